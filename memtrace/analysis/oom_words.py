"""The answers of `oom` in words: what happened, why, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator

from memtrace.allocator.releases import Total
from memtrace.analysis.oom import Oom, Place
from memtrace.timeline import in_words
from memtrace.units import format_bytes, format_seconds, plural

_CAPACITY_HINT = "--gpu NAME or --gpu SIZE says how much the device has."


class Words:
    """Sentences about one answer. `units` as in `format_bytes`; `rank` of a job of several; `at_peak`: a request is
    supposed at the peak."""

    def __init__(self, answer: Oom, units: str = "auto", *, rank: int | None = None, at_peak: bool = False) -> None:
        self.answer, self.units, self.rank, self.at_peak = answer, units, rank, at_peak

    def headline(self) -> str:
        """What was asked, and what there was."""
        return self._supposed() if self.answer.is_hypothetical else self._failed()

    def reasons(self) -> Iterator[str]:
        """The verdict and what to do about it, then what else must be known to read the figures."""
        answer = self.answer
        if answer.verdict is not None:
            why = {
                "fragmentation": self._fragmentation,
                "other-streams": self._other_streams,
                "limit": self._limit,
                "outside-torch": self._outside,
                "lack": self._lack,
            }[answer.verdict]
            yield why()
        elif answer.fits is None:
            yield f"It fits if the driver has that much left. {_CAPACITY_HINT}"
        if answer.hole_bytes is not None and not answer.fits:
            yield self._hole_not_taken(answer.hole_bytes)
        if answer.is_private:
            yield (
                "A private pool asked, of a CUDA graph or a MemPool: the free memory counted here is the default "
                "pool's, which is not for it."
            )
        if answer.pending_bytes:
            yield f"{self._size(answer.pending_bytes)} more was freed by the program, but waited for a stream."

    def before(self) -> str:
        """What was given back to the driver before."""
        retries, flushes = self.answer.retries, self.answer.flushes
        collected = " or garbage was collected" if self.answer.rules.collect_above else ""
        parts = []
        if retries.count:
            parts.append(f"at least {self._times(retries)} because an allocation had failed{collected}")
        if flushes.count:
            parts.append(f"at least {self._times(flushes)} by empty_cache()")
        if not parts:
            return "Before it, no cached segment was given back to the driver."
        return f"Before it, cached segments were given back to the driver {', '.join(parts)}."

    def _size(self, size: int) -> str:
        return format_bytes(size, self.units)

    def _times(self, total: Total) -> str:
        return f"{'once' if total.count == 1 else plural(total.count, 'time')} ({self._size(total.bytes)})"

    def _failed(self) -> str:
        answer = self.answer
        phase = in_words(answer.place.phase, answer.place.step)
        who = "Out of memory" if self.rank is None else f"Rank {self.rank} out of memory"
        left = answer.device_free_bytes
        end = "" if left is None else f"; the device had {self._size(left)} left"
        return (
            f"{who}{f' in {phase}' if phase else ''} ({moment(answer.place)}): asked {self._size(answer.asked_bytes)}, "
            f"the driver for {self._size(answer.segment_bytes)}; torch held {self._size(answer.reserved_bytes)}, "
            f"{self._free()}{end}."
        )

    def _free(self) -> str:
        cache = self.answer.cache
        if not cache.free:
            return "none of it free for this"
        if cache.free == cache.largest:
            return f"{self._size(cache.free)} of it free for this, in one hole"
        return f"{self._size(cache.free)} of it free for this, largest hole {self._size(cache.largest)}"

    def _supposed(self) -> str:
        answer, asked = self.answer, self._size(self.answer.asked_bytes)
        phase = in_words(answer.place.phase, answer.place.step)
        where = ", ".join(["at the peak"] * self.at_peak + [f"in {phase}"] * bool(phase))
        where = f"{where} ({moment(answer.place)})".strip()
        if answer.fits and answer.hole_bytes is not None and not answer.is_kept_whole:
            return f"{asked} would have fitted {where}: in a free hole of {self._size(answer.hole_bytes)}."
        given = answer.cache.releasable
        held = f"torch held {self._size(answer.reserved_bytes)}"
        held += f", of which it can give {self._size(given)} back" if given else ""
        segment = f"a new segment of {self._size(answer.segment_bytes)}"
        if answer.fits is None:
            return f"{asked} would have needed {segment} {where}; {held}."
        left, cap = answer.device_free_bytes, answer.capacity.limit_bytes
        room = "" if left is None else f"; the device had {self._size(left)} left"
        room += "" if cap is None else f"; torch's own cap is {self._size(cap)}"
        return f"{asked} would {'' if answer.fits else 'not '}have fitted {where}: it needs {segment}; {held}{room}."

    def _fragmentation(self) -> str:
        answer = self.answer
        text = (
            f"Fragmentation: the {self._size(answer.cache.free)} free in the {answer.pool} pool of its stream would "
            "hold it in one piece, but it is in several, with blocks in use and the ends of segments between them."
        )
        if not answer.rules.expandable:
            text += " expandable_segments:True lets segments grow together."
        return f"{text} What lives long is better made before what is large, and large things at the same sizes."

    def _other_streams(self) -> str:
        answer, cache = self.answer, self.answer.cache
        text = (
            f"Other streams: {self._size(cache.other_free)} is free in the {answer.pool} pool of other streams, "
            f"largest hole {self._size(cache.other_largest)}, which would hold it. Torch gives a block only to the "
            "stream that its segment was taken for: allocate on one stream, or leave the side stream less to allocate."
        )
        if answer.device_had_room:
            text += " The device had room for a new segment, too: torch's own cap refused it, so raising that helps."
        return text

    def _limit(self) -> str:
        answer, cap = self.answer, self.answer.capacity.limit_bytes
        wanted = answer.reserved_bytes + answer.segment_bytes
        said = "The file does not say the cap."
        if cap is not None and not answer.is_hypothetical and wanted <= cap:
            said = f"The cap of {self._size(cap)} would have allowed it: it was another then, or the driver refused."
        elif cap is not None:
            said = f"The cap is {self._size(cap)}."
        elif answer.cap_below_bytes is not None:
            held = answer.cap_at_least_bytes
            least = "" if held is None else f"at least {self._size(held)}, which torch held, and "
            said += f" It is {least}less than {self._size(answer.cap_below_bytes)}, which was refused."
        return (
            f"Torch's own cap, not the device: the driver had room for the segment. {said} It comes from "
            "torch.cuda.set_per_process_memory_fraction() or per_process_memory_fraction in PYTORCH_CUDA_ALLOC_CONF: "
            "raise it or take it away."
        )

    def _outside(self) -> str:
        answer = self.answer
        capacity, outside = answer.capacity.capacity_bytes or 0, answer.outside_torch_bytes or 0
        return (
            f"Memory outside torch: of the device's {self._size(capacity)} torch held "
            f"{self._size(answer.reserved_bytes)} and others {self._size(outside)}; without them it would have fitted. "
            "Others are other processes (nvidia-smi lists them) and, in this one, the CUDA context and libraries that "
            "allocate past torch, such as NCCL."
        )

    def _lack(self) -> str:
        answer = self.answer
        text = "Plain lack, not fragmentation: joined together the free memory would not hold it either."
        if answer.hole_bytes is not None:
            text = "Plain lack: neither the device nor another stream had room for it."
        capacity, outside = answer.capacity.capacity_bytes, answer.outside_torch_bytes
        if capacity is None:
            held = self._size(answer.reserved_bytes)
            return f"{text} Torch held only {held}: if the device has more, others hold that. {_CAPACITY_HINT}"
        if capacity < answer.reserved_bytes:
            return f"{text} The device has only {self._size(capacity)}, which is less than torch held."
        others = "" if outside is None else f", of which others held {self._size(outside)}"
        cap = answer.capacity.limit_bytes
        capped = "" if cap is None else f"; torch's own cap is {self._size(cap)}"
        return f"{text} The device has {self._size(capacity)}{others}{capped}. Less must be held at that moment."

    def _hole_not_taken(self, hole: int) -> str:
        if self.answer.is_kept_whole:
            why = "max_split_size keeps it from requests of this size"
        else:
            why = (
                "it came free when torch had looked already (another thread, or a stream that it waited for), or a "
                "private pool asked"
            )
        return f"A hole of {self._size(hole)} in its own stream would hold it, and was not taken: {why}."


def moment(place: Place) -> str:
    """`event 80 of 81, 0.016 s in`."""
    if place.event < 0:
        return "before the first event" if place.events else "when the snapshot was taken"
    text = f"event {place.event:,} of {place.events:,}"
    if place.time_us is not None and place.first_us is not None:
        text += f", {format_seconds(place.time_us - place.first_us)} in"
    return text
