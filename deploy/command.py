"""Workers of a cluster, whose numbers an operator's command sets."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shlex
import shutil
import signal
import string
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from twinpool.clock import Clock, MonotonicClock
from twinpool.config import MOST_WORKERS, Role, require
from twinpool.coordinator.scaler import FAILURE_SHOWN_S, Premises
from twinpool.deploy.counts import Counts, Order
from twinpool.errors import ConfigError

EXAMPLE = "kubectl scale deployment twinpool-{role} --replicas={count}"
TIMEOUT_S = 60.0
MOST_TIMEOUT_S = 3600.0
_FIELDS = ("role", "count", "gone")
_MOST_QUOTED = 300
"""Bytes of what a command wrote to stderr, the last ones."""
_HERE_ONLY = ("--workers-on-host=", "--workers-on-device=", "--device=")
"""What `serve` tells workers of its own host, and nobody else."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScaleCommand:
    """What is run to have so many workers of a role, for `timeout_s` at most. In `arguments` {role}, {count} and {gone}
    stand for an Order's; they are handed to the program as they are, never through a shell."""

    arguments: tuple[str, ...]
    timeout_s: float = TIMEOUT_S

    @classmethod
    def parse(cls, text: str, timeout_s: float | None) -> ScaleCommand:
        """Of a command line. Raises ConfigError: it is none, nobody can run it, or a field is not known."""
        flag = "--scale-command"
        try:
            arguments = tuple(shlex.split(text))
        except ValueError as exc:
            raise ConfigError(f"{flag} is {text!r}, which is no command line: {exc}") from exc
        require(flag, text, bool(arguments), f"a command, like {EXAMPLE!r}")
        if shutil.which(arguments[0]) is None:
            raise ConfigError(
                f"{flag} is {text!r}, and {arguments[0]!r} is no program that can be run; give its path, and make it "
                "executable (chmod +x)"
            )
        limit = TIMEOUT_S if timeout_s is None else timeout_s
        require(
            "--scale-timeout", limit, 0 < limit <= MOST_TIMEOUT_S, f"above 0, at most {MOST_TIMEOUT_S:.0f}"
        )
        command = cls(arguments, limit)
        try:
            command.filled(Order(Role.PREFILL, 1))
        except (KeyError, IndexError, ValueError, AttributeError) as exc:
            raise ConfigError(
                f"{flag} is {text!r}; in braces may be {', '.join(_FIELDS)}, a brace of its own is written twice"
            ) from exc
        return command

    def filled(self, order: Order) -> list[str]:
        """The arguments for `order`. Raises what `str.format` does for fields that there are not."""
        fields = dict(zip(_FIELDS, (order.role.value, str(order.count), ",".join(order.gone)), strict=True))
        return [string.Formatter().vformat(argument, (), fields) for argument in self.arguments]


class CommandScaler:
    """Runs `command` whenever other numbers are wanted, one after the other. See `deploy.counts` for what they count.

    Its environment is the server's, with TWINPOOL_ROLE, TWINPOOL_COUNT and TWINPOOL_GONE, the ids of those that have
    been told to end, TWINPOOL_CONNECT, where workers connect, the join token, and TWINPOOL_WORKER_ARGUMENTS, further
    ones for `twinpool worker` to be like those that `serve` starts itself.
    """

    def __init__(self, command: ScaleCommand, premises: Premises, clock: Clock | None = None) -> None:
        self._command = command
        self._premises = premises
        self._clock = clock or MonotonicClock()
        self._counts = Counts()
        self._failures: dict[Role, tuple[float, str]] = {}
        self._since = 0.0
        """When the order under way began, or the last one ended."""
        self._task: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """As `Scaler.begin`."""
        self._counts.begin(spec.role for spec in self._premises.specs)
        self._tell()

    def workers(self) -> Mapping[str, Role]:
        """As `Scaler.workers`; those that have not joined are named by number."""
        members = self._premises.members()
        return {name: member.role for name, member in members.items()} | self._counts.awaited(members)

    def waits_for(self) -> str:
        """As `Scaler.waits_for`."""
        seconds = self._clock.now() - self._since
        if (order := self._counts.order) is not None:
            return f"the scale command to end ({order.role} {order.count}, {seconds:.0f} s so far)"
        if self._task is not None and not self._task.done():
            return "the scale command to begin"
        return f"a worker to join; the scale command has ended {seconds:.0f} s ago"

    def failed(self) -> Mapping[str, str]:
        """As `Scaler.failed`: by role what the command said last, for a while, or until it is run for it again."""
        oldest = self._clock.now() - FAILURE_SHOWN_S
        return {f"{role} workers": reason for role, (at, reason) in self._failures.items() if at >= oldest}

    def why_no_start(self) -> str:
        """As `Scaler.why_no_start`."""
        wanted = self._counts.num_wanted()
        return "" if wanted < MOST_WORKERS else f"{wanted} workers are wanted, as many as may be"

    def start(self, role: Role) -> None:
        """As `Scaler.start`."""
        self._counts.start(role, self._premises.members())
        self._tell()

    def stop(self, worker_id: str, role: Role) -> None:
        """As `Scaler.stop`."""
        self._counts.stop(worker_id, role, self._premises.members())
        self._tell()

    def assign(self, worker_id: str, role: Role) -> None:
        """As `Scaler.assign`: if the cluster starts it again, then in the role that it was started as."""
        self._counts.assign(worker_id, role)

    async def close(self) -> None:
        """As `Scaler.close`; a command that runs is ended."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    # ── telling ─────────────────────────────────────────────────────────────────────────────────────────────

    def _tell(self) -> None:
        """Once the event loop is back: what is wanted in one breath is told together."""
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._tell_all())

    async def _tell_all(self) -> None:
        while (order := self._counts.next_order()) is not None:
            self._failures.pop(order.role, None)
            self._since = self._clock.now()
            try:
                reason = await self._run(order)
            except OSError as exc:
                reason = (
                    f"`{shlex.join(self._command.filled(order))}` cannot be started: {exc.strerror or exc}"
                )
            self._since = self._clock.now()
            if not reason:
                self._counts.done()
                continue
            self._counts.failed()
            self._failures[order.role] = (self._since, f"not {order.count} of them: {reason}")
            log.error("%s workers are not scaled to %d: %s", order.role, order.count, reason)

    async def _run(self, order: Order) -> str:
        """Runs the command; why it failed, empty if it did not. Raises OSError if it cannot be started."""
        arguments = self._command.filled(order)
        shown = shlex.join(arguments)
        log.info("scaling to %d %s workers: %s", order.count, order.role, shown)
        with tempfile.TemporaryFile() as stderr:  # a pipe would end only with what the command leaves running
            process = await asyncio.create_subprocess_exec(
                *arguments,
                env=self._environment(order),
                start_new_session=True,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=stderr,
            )
            try:
                async with asyncio.timeout(self._command.timeout_s):
                    status = await process.wait()
            except TimeoutError:
                return f"`{shown}` has not ended within {self._command.timeout_s:g} s (--scale-timeout), and was killed"
            finally:
                if process.returncode is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGKILL)
                    await process.wait()
            if status == 0:
                return ""
            stderr.seek(max(0, stderr.seek(0, os.SEEK_END) - _MOST_QUOTED))
            said = stderr.read().decode(errors="replace").strip() or "it said nothing"
            return f"`{shown}` ended with status {status}: {said}"

    def _environment(self, order: Order) -> dict[str, str]:
        return {
            **os.environ,
            **self._premises.secrets,
            "TWINPOOL_ROLE": order.role.value,
            "TWINPOOL_COUNT": str(order.count),
            "TWINPOOL_GONE": ",".join(order.gone),
            "TWINPOOL_CONNECT": self._premises.endpoint,
            "TWINPOOL_WORKER_ARGUMENTS": shlex.join(self._worker_arguments()),
        }

    def _worker_arguments(self) -> Sequence[str]:
        arguments = self._premises.specs[0].arguments
        return [each for each in arguments if not each.startswith(_HERE_ONLY)]
