"""Ways in which a job ends other than with all its rows done."""

from zinfer.errors import JobError


class UnusableInput(JobError):
    """The job was refused before any compute: its input, its output or its settings cannot be used."""


class Interrupted(BaseException):
    """A signal asked the job to end; what it has written is kept. Not an `Exception`, so that nothing swallows it."""

    def __init__(self, signal_number: int) -> None:
        super().__init__(signal_number)
        self.signal_number = signal_number

    @property
    def exit_code(self) -> int:
        """What a shell reports for a process ended by this signal: 130 for Ctrl-C, 143 for SIGTERM, 129 for SIGHUP."""
        return 128 + self.signal_number
