# fp8train on NVIDIA's PyTorch image, which carries torch, apex and Transformer Engine built for
# one another.
#
#     docker build -t fp8train .
#     docker run --gpus all --ipc=host --ulimit memlock=-1 -it fp8train \
#         torchrun --nproc-per-node 8 launch/train.py +recipe=llama3_8b_fp8
ARG BASE=nvcr.io/nvidia/pytorch:26.05-py3
FROM ${BASE}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
WORKDIR /workspace/fp8train

# The image's own constraints (PIP_CONSTRAINT) stay in force. Our constraints.txt does not apply
# here, because it pins another torch. The torch that is installed is a constraint as well, so a
# package that asks for another one ends the build.
COPY requirements-no-torch.txt ./
RUN python -m pip list --format=freeze | grep '^torch==' >/tmp/torch.txt \
    && python -m pip install --no-cache-dir \
        --constraint /tmp/torch.txt --requirement requirements-no-torch.txt

# The build backend may be newer than the image's constraints allow; it leaves nothing behind.
COPY . .
RUN env -u PIP_CONSTRAINT python -m pip install --no-cache-dir --no-deps --editable . \
    && { python -m pip check || true; } >/tmp/check.txt \
    && ! grep '^fp8train ' /tmp/check.txt
