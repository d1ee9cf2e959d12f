"""Which processes make a mesh and how each is started: a pure function of options, ports and paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from deploy.envoy.bootstrap import bootstrap_json
from deploy.envoy.settings import Address, EnvoySettings, otlp_address
from services.cli.options import MeshOptions
from services.cli.state import StateDir
from services.common.models import ModelSource

LOOPBACK = "127.0.0.1"
# From the clients inwards; the last is the first to start.
STOP_ORDER = ("envoy", "gateway", "worker", "router", "kvstore", "valkey")
# Envoy has waited for the requests in flight before a service is told to stop.
DRAIN_DEADLINE_S = 8.0
# In a rollout streams end by themselves at a gateway, and at an Envoy that has a successor.
GATEWAY_DRAIN_DEADLINE_S = 300.0
PREDECESSOR_S = 300
MAX_VALKEY_BYTES = 512 * 2**20


@dataclass(frozen=True, slots=True)
class ProcessSpec:
    """One process. `metrics` is empty where there is no Prometheus page; `admin` is Envoy's.

    `environment` goes before the supervisor's own environment, `defaults` after it. `folder` is where it runs, None for
    the supervisor's own. A `base_id` other than 0 names a program that can be hot restarted.
    """

    name: str
    kind: str
    command: tuple[str, ...]
    address: str
    metrics: str = ""
    admin: str = ""
    folder: Path | None = None
    base_id: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    defaults: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Binaries:
    """Servers that are not ours."""

    envoy: Path
    valkey: Path


@dataclass(frozen=True, slots=True)
class MeshPlan:
    """All processes, in the order of starting, and the files that they read.

    on_demand: workers that are started when their model, by name, is asked for, at most max_loaded at a time.
    """

    processes: tuple[ProcessSpec, ...]
    files: dict[Path, str]
    redis_url: str
    http_address: str
    on_demand: dict[str, ProcessSpec] = field(default_factory=dict)
    max_loaded: int = 0


class Planner:
    """Makes a plan; `ports` yields free ports."""

    def __init__(
        self,
        options: MeshOptions,
        models: tuple[ModelSource, ...],
        on_demand: tuple[ModelSource, ...] = (),
        *,
        state: StateDir,
        binaries: Binaries,
        ports: Iterator[int],
        redis_password: str,
        otlp_endpoint: str,
    ) -> None:
        self._options = options
        self._models = models
        self._on_demand = on_demand
        self._state = state
        self._binaries = binaries
        self._ports = ports
        self._redis_password = redis_password
        self._otlp_endpoint = otlp_endpoint
        self._files: dict[Path, str] = {}

    def plan(self) -> MeshPlan:
        """Processes of every kind."""
        options = self._options
        first: list[ProcessSpec] = []
        redis_url = options.redis_url
        if not redis_url:
            valkey, redis_url = self._valkey()
            first.append(valkey)
        kvstores = [self._service("kvstore", one, redis_url, *self._kvstore(one)) for one in range(options.kvstores)]
        routers = [self._service("router", one, redis_url, *self._router()) for one in range(options.routers)]
        workers = [self._service("worker", one, redis_url, *self._worker(one)) for one in range(len(options.roles))]
        on_demand = {
            model.name: self._service("worker", number, redis_url, *self._worker_of(model))
            for number, model in enumerate(self._on_demand, len(workers))
        }
        gateways = [
            self._service("gateway", one, redis_url, *self._gateway(one, routers)) for one in range(options.gateways)
        ]
        processes = (*first, *kvstores, *routers, *workers, *gateways, self._envoy(gateways))
        address = f"{options.http_host}:{options.http_port}"
        return MeshPlan(processes, self._files, redis_url, address, on_demand, options.max_loaded_models)

    def _service(self, kind: str, number: int, redis_url: str, *arguments: str) -> ProcessSpec:
        name = f"{kind}-{number}"
        address, metrics = self._address(), self._address()
        common = (
            *("--instance", name, "--listen", address, "--metrics-listen", metrics),
            *("--mesh-secret-file", str(self._state.secret_file)),
            *("--ready-file", str(self._state.ready_file(name))),
            *("--drain-deadline-s", str(GATEWAY_DRAIN_DEADLINE_S if kind == "gateway" else DRAIN_DEADLINE_S)),
        )
        return ProcessSpec(
            name=name,
            kind=kind,
            command=(sys.executable, "-m", f"services.{kind}", *common, *arguments),
            address=address,
            metrics=metrics,
            # Not a flag: the URL may hold a password, and command lines are public.
            environment={"KVMESH_REDIS_URL": redis_url},
            defaults=self._defaults(kind),
        )

    def _defaults(self, kind: str) -> dict[str, str]:
        """What the operator's environment may say otherwise."""
        if kind == "worker":
            return self._worker_defaults()
        if kind == "gateway":
            return {"KVMESH_GATEWAY_FILES_DIR": str(self._state.files)}
        if kind == "router":
            return {"KVMESH_ROUTER_ADMIN_KEYS_FILE": str(self._state.admin_keys_file)}
        return {}

    def _kvstore(self, number: int) -> tuple[str, ...]:
        options = self._options
        ssd = options.kvstore_ssd_mb
        return (
            *_flag("ram-bytes", _bytes(options.kvstore_mb)),
            *_flag("ssd-bytes", _bytes(ssd)),
            *_flag("ssd-path", None if ssd is None else self._state.ssd(f"kvstore-{number}")),
        )

    def _router(self) -> tuple[str, ...]:
        options = self._options
        return (
            *_flag("policy", options.policy),
            *_flag("unload-idle-s", options.unload_idle_s if self._on_demand else None),
        )

    def _worker_defaults(self) -> dict[str, str]:
        """Simulated workers have no compute threads."""
        options = self._options
        return {} if options.engine == "sim" else {"KVMESH_WORKER_THREADS": str(options.fair_threads)}

    def _worker(self, number: int) -> tuple[str, ...]:
        role = self._options.roles[number]
        return (
            *self._worker_of(self._models[number % len(self._models)]),
            *_flag("role", None if role == "both" else role),
        )

    def _worker_of(self, model: ModelSource) -> tuple[str, ...]:
        options = self._options
        return (
            *_flag("model", f"{model.name}={model.path}"),
            *_flag("engine", options.engine),
            *_flag("device", options.device),
            *_flag("dtype", options.dtype),
            *_flag("weight-dtype", options.weight_dtype),
            *_flag("threads", options.threads),
            *_flag("tensor-parallel", options.tensor_parallel),
            *_flag("pipeline-parallel", options.pipeline_parallel),
            *_flag("expert-parallel", options.expert_parallel),
            *_flag("kv-cache-bytes", _bytes(options.kv_cache_mb)),
        )

    def _gateway(self, number: int, routers: list[ProcessSpec]) -> tuple[str, ...]:
        # Each begins with another router, so that all of them work.
        first = number % len(routers)
        addresses = ",".join(router.address for router in routers[first:] + routers[:first])
        models = ",".join(f"{model.name}={model.path}" for model in (*self._models, *self._on_demand))
        name = f"gateway-{number}"
        files = (
            *("--generations-file", str(self._state.generations(name))),
            *("--usage-file", str(self._state.usage(name))),
        )
        return (
            *("--routers", addresses, "--models", models, *files),
            *_flag("on-demand-models", ",".join(model.name for model in self._on_demand) or None),
        )

    def _valkey(self) -> tuple[ProcessSpec, str]:
        address, port = self._address_and_port()
        configuration = self._state.run / "valkey.conf"
        lines = (
            f"bind {LOOPBACK}",
            f"port {port}",
            f"requirepass {self._redis_password}",
            'save ""',
            "appendonly no",
            f"maxmemory {MAX_VALKEY_BYTES}",
            "maxmemory-policy noeviction",
            f"dir {self._state.run}",
        )
        self._files[configuration] = "\n".join(lines) + "\n"
        command = (str(self._binaries.valkey), str(configuration))
        return ProcessSpec("valkey", "valkey", command, address), f"redis://:{self._redis_password}@{address}/0"

    def _envoy(self, gateways: list[ProcessSpec]) -> ProcessSpec:
        options = self._options
        admin, metrics = self._address(), self._address()
        settings = EnvoySettings(
            listen=Address(options.http_host, options.http_port),
            admin=Address.parse(admin),
            metrics=Address.parse(metrics),
            gateways=tuple(Address.parse(gateway.address) for gateway in gateways),
            otlp=otlp_address(self._otlp_endpoint),
            trace_sampling_percent=options.trace_sampling_percent,
        )
        configuration = self._state.run / "envoy.json"
        self._files[configuration] = bootstrap_json(settings)
        # A port of its own tells it from other Envoys of this machine.
        base_id = settings.admin.port
        flags = (
            *("--concurrency", "1", "--log-level", "warning"),
            # Relative to its folder: a socket's name must be short.
            *("--base-id", str(base_id), "--socket-path", "envoy"),
            *("--parent-shutdown-time-s", str(PREDECESSOR_S), "--drain-strategy", "immediate"),
        )
        command = (str(self._binaries.envoy), "-c", str(configuration), *flags)
        address = str(settings.listen)
        return ProcessSpec("envoy", "envoy", command, address, metrics, admin, self._state.run, base_id)

    def _address(self) -> str:
        return self._address_and_port()[0]

    def _address_and_port(self) -> tuple[str, int]:
        port = next(self._ports)
        return f"{LOOPBACK}:{port}", port


def _flag(name: str, value: object) -> tuple[str, ...]:
    return () if value is None else (f"--{name}", str(value))


def _bytes(mebibytes: int | None) -> int | None:
    return None if mebibytes is None else mebibytes * 2**20
