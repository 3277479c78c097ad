"""Who runs, what it is called, whom it joins."""

import pytest

from baton.core.errors import ConfigurationError
from baton.core.messages import Role
from baton.core.queueing import POLICIES
from baton.launch.options import EngineFlags, GatewayFlags, HostPort, parse_engine_options, parse_local_prefill
from baton.launch.topology import (
    Cluster,
    GatewayOptions,
    gateway_config,
    local_worker_configs,
    require_topology,
    worker_places,
)

CLUSTER = Cluster(
    run_dir="/dev/shm/baton-1",
    key_file="/dev/shm/baton-1/cluster.key",
    http=HostPort("127.0.0.1", 8000),
    join=HostPort("10.0.0.5", 7000),
    served_model="my-model",
    log_level="info",
    debug=False,
)


def test_configs_of_two_prefill_and_one_decode(builders):
    resolved = builders.resolve(builders.AUTO, builders.MACHINE, builders.SMOLLM2, 3)
    gateway = gateway_config(CLUSTER, builders.SMOLLM2, "float16", 2, 1, builders.AUTO)
    workers = local_worker_configs(CLUSTER, builders.SMOLLM2, resolved, worker_places(2, 1, None))

    assert [worker.worker_id for worker in workers] == ["prefill-0", "prefill-1", "decode-0"]
    assert [worker.roles for worker in workers] == [(Role.PREFILL,), (Role.PREFILL,), (Role.DECODE,)]
    assert {(worker.prefill.token_budget, worker.decode.token_budget) for worker in workers} == {(512, 256)}
    assert gateway.bind == ("ipc:///dev/shm/baton-1/gateway.sock", "tcp://10.0.0.5:7000")
    assert all(worker.network.join == ("ipc:///dev/shm/baton-1/gateway.sock",) for worker in workers)
    assert all(worker.network.listen_host == "10.0.0.5" for worker in workers)  # where others reach them
    assert {worker.model_digest for worker in workers} == {gateway.model_digest}
    assert {worker.served_model for worker in workers} == {gateway.served_model} == {"my-model"}
    assert (gateway.expected_prefill, gateway.expected_decode) == (2, 1)
    assert (gateway.host, gateway.port) == ("127.0.0.1", 8000)


@pytest.mark.parametrize("policy", POLICIES)
def test_policy_targets_and_elastic_reach_gateway_and_workers(builders, policy):
    flags = EngineFlags(policy=policy, ttft_target="1s", tpot_target="50ms", elastic=True)
    options = parse_engine_options(flags)
    gateway = gateway_config(CLUSTER, builders.SMOLLM2, "float16", 1, 1, options)
    assert (gateway.policy, gateway.ttft_target_s, gateway.tpot_target_s) == (POLICIES[policy], 1.0, 0.05)
    assert gateway.is_elastic
    resolved = builders.resolve(options, builders.MACHINE, builders.SMOLLM2, 2)
    for worker in local_worker_configs(CLUSTER, builders.SMOLLM2, resolved, worker_places(1, 1, None)):
        assert worker.prefill.policy == worker.decode.policy == POLICIES[policy]
    assert parse_engine_options(EngineFlags()).policy == POLICIES["fair"]


@pytest.mark.parametrize(("word", "may_be_local"), [("auto", True), ("never", False)])
def test_where_prompts_may_be_computed_reaches_the_gateway(builders, word, may_be_local):
    options = GatewayOptions(may_prefill_locally=parse_local_prefill(GatewayFlags(local_prefill=word)))
    gateway = gateway_config(CLUSTER, builders.SMOLLM2, "float16", 1, 1, builders.AUTO, options)
    assert gateway.may_prefill_locally == may_be_local
    assert gateway_config(CLUSTER, builders.SMOLLM2, "float16", 1, 1, builders.AUTO).may_prefill_locally


def test_any_other_word_for_it_is_refused():
    with pytest.raises(ConfigurationError, match="--local-prefill 'always' is not known"):
        parse_local_prefill(GatewayFlags(local_prefill="always"))


def test_the_digest_tells_dtypes_apart(builders):
    assert builders.SMOLLM2.digest("float16") != builders.SMOLLM2.digest("float32")
    assert builders.SMOLLM2.digest("float16") == builders.SMOLLM2.digest("float16")


@pytest.mark.parametrize(("prefill", "decode"), [(0, 1), (1, 1), (2, 2), (0, 64)])
def test_pools_that_serve(prefill, decode):
    require_topology(prefill, decode)


@pytest.mark.parametrize(("prefill", "decode"), [(1, 0), (-1, 1), (0, 65), (1, -2)])
def test_pools_that_cannot_serve(prefill, decode):
    with pytest.raises(ConfigurationError, match="--decode"):
        require_topology(prefill, decode)
