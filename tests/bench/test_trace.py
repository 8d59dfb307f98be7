"""Idle shares and gaps of made-up traces."""

from __future__ import annotations

from h200_parts.trace import Interval, gap_lines, gaps, intervals_of, kernel_lines, short_name


def test_overlapping_kernels_leave_no_gap() -> None:
    ran = [Interval(0, 10, "a"), Interval(8, 12, "b"), Interval(9, 11, "c"), Interval(15, 20, "d")]
    assert [(gap.length, gap.before, gap.after) for gap in gaps(ran, 0, 25)] == [(3, "b", "d"), (5, "d", "(end)")]
    assert [gap.length for gap in gaps([], 0, 10)] == [10]
    assert gaps([Interval(0, 10, "a")], 0, 10) == []


def test_a_trace_counts_what_ran_on_the_device() -> None:
    def event(name: str, ts: float, dur: float, cat: str = "kernel", ph: str = "X") -> dict[str, object]:
        return {"name": name, "ts": ts, "dur": dur, "cat": cat, "ph": ph}

    events = [
        event("late", 20, 5) | {"args": {"grid": [4, 1, 1]}},
        event("copy", 10, 2, "gpu_memcpy"),
        event("host", 0, 100, "cpu_op"),
        event("flow", 0, 9, ph="s"),
    ]
    assert intervals_of({"traceEvents": events}) == [Interval(10, 12, "copy"), Interval(20, 25, "late", "4,1,1")]


def test_lines_are_per_step_and_largest_first() -> None:
    ran = [Interval(0, 4, "a"), Interval(5, 25, "b", "8,2,1"), Interval(26, 30, "a"), Interval(31, 51, "b", "8,2,1")]
    assert kernel_lines(ran, 2) == [
        "    20.00 us a step in    1.00 launches: b 8,2,1",
        "     4.00 us a step in    1.00 launches: a",
    ]
    assert gap_lines(gaps(ran, 0, 51), 2)[0] == "     1.00 us a step in    1.00 gaps: a -> b"


def test_names_are_cut_to_what_tells_them_apart() -> None:
    name = "void (anonymous namespace)::elementwise<float, Foo<int, 3> >::kernel<4>(int, float*)"
    assert short_name(name) == "elementwise::kernel"
    assert short_name("skinny_linear_kernel") == "skinny_linear_kernel"
    assert len(short_name("x" * 300)) == 80
