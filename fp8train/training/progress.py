"""What a person sees while a run trains: the banner, then step, loss, tokens/s, time left."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

FILE_WIDTH = 160  # columns where the output is not a terminal: nothing is cut
LINES = 20  # progress lines of a run whose output is not a terminal


class ProgressLine:
    """A live bar on a terminal; elsewhere a line now and then. Silent on ranks other than 0."""

    def __init__(self, steps: int, start: int, visible: bool) -> None:
        self.console = Console(highlight=False, quiet=not visible)
        if not self.console.is_terminal:
            self.console.width = FILE_WIDTH
        self.steps = steps
        self.every = max(1, steps // LINES)
        self.start, self.busy = start, 0.0  # seconds spent in steps, validation left out
        self.bar: Progress | None = None
        if visible and self.console.is_terminal:
            self.bar = Progress(
                TextColumn("step {task.completed:.0f}/{task.total:.0f}"),
                BarColumn(),
                TextColumn("loss {task.fields[loss]:.4f}  {task.fields[rate]:,.0f} tokens/s"),
                TimeRemainingColumn(),
                console=self.console,
            )
            self.task = self.bar.add_task("", total=steps, completed=start, loss=0.0, rate=0.0)

    def __enter__(self) -> ProgressLine:
        if self.bar:
            self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.bar:
            self.bar.stop()

    def update(self, step: int, loss: float, tokens_per_second: float, seconds: float) -> None:
        """A step is done; it took so many seconds."""
        self.busy += seconds
        if self.bar:
            self.bar.update(self.task, completed=step, loss=loss, rate=tokens_per_second)
        elif step % self.every == 0 or step in (self.start + 1, self.steps):
            left = self.busy / (step - self.start) * (self.steps - step)
            self.console.print(
                f"step {step:>{len(str(self.steps))}}/{self.steps}  loss {loss:.4f}  "
                f"{tokens_per_second:,.0f} tokens/s  {clock(left)} left"
            )

    def say(self, text: str) -> None:
        """A line of its own, above the bar."""
        self.console.print(text)


def clock(seconds: float) -> str:
    """A duration as m:ss or h:mm:ss."""
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"


def print_banner(
    console: Console, rows: dict[str, str], layers: list[tuple[str, int, str, str, str]]
) -> None:
    """The facts of the run, and which layers run in which precision."""
    width = max(len(name) for name in rows)
    for name, value in rows.items():
        console.print(f"{name:<{width}}  {value}", soft_wrap=True)
    table = Table("layers", "count", "recipe", "input/weight/grad_output", "backend", box=None)
    for kind, count, recipe, formats, backend in layers:
        table.add_row(kind, str(count), recipe, formats, backend)
    console.print(table)
