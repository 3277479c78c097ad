"""Timeline: neighbouring differences add up to the whole."""

from baton.core.timeline import Station, Timeline


def test_stages_add_up_to_the_time_to_first_chunk_exactly() -> None:
    stamps = dict(zip(Station, (100, 130, 131, 150, 155, 300, 320, 331, 340), strict=True))
    stages = Timeline(stamps).stages()
    assert sum(duration for _, _, duration in stages) == 340 - 100
    assert stages[0] == (Station.RECEIVED, Station.TOKENISED, 30)


def test_a_missing_station_joins_its_neighbours() -> None:
    stamps = {Station.RECEIVED: 0, Station.DISPATCHED: 7, Station.FIRST_CHUNK: 10}
    assert Timeline(stamps).stages() == [
        (Station.RECEIVED, Station.DISPATCHED, 7),
        (Station.DISPATCHED, Station.FIRST_CHUNK, 3),
    ]


def test_merging_keeps_all_stamps_and_adds_copy_times() -> None:
    prefill = Timeline({Station.PREFILL_COMPUTED: 5}, copy_ns=2, message_ns=1)
    decode = Timeline({Station.HANDED_OVER: 9}, copy_ns=3)
    assert prefill.merged(decode) == Timeline({Station.PREFILL_COMPUTED: 5, Station.HANDED_OVER: 9}, 5, 1)


def test_a_stamp_is_monotonic_time_in_nanoseconds() -> None:
    timeline = Timeline().stamped(Station.RECEIVED).stamped(Station.TOKENISED)
    assert 0 < timeline.stamps[Station.RECEIVED] <= timeline.stamps[Station.TOKENISED]
