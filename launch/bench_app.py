"""`baton bench` and what is below it: load on a server by default, `baton bench kernels` and `gateway` without one."""

from cyclopts import App

from ..bench.command import bench_command

app = App(name="bench", help="Load any OpenAI-compatible server and measure it; `kernels`, `gateway`: parts of it.")
app.default(bench_command)
app.command(
    "baton.launch.bench_kernels:bench_kernels",
    name="kernels",
    help="What each op takes on this device, beside its floor.",
)
app.command(
    "baton.launch.bench_gateway:bench_gateway",
    name="gateway",
    help="Chunks per second of the gateway alone, beside a bare server's.",
)
