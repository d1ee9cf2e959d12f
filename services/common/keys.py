"""Names of everything that a mesh keeps in Redis.

Keys that one script touches share a hash tag, so that Redis Cluster keeps them together: `{mesh:registry}` for the
registry, `{mesh:generations}` for the generations of tenants, `{mesh:control}` for what operators have set,
`{mesh:quota:<tenant>}` for what a tenant uses, `{mesh:usage}` for what all have used, `{mesh:request:<tag>}` for a
request with an idempotency key, `{mesh:batch:<id>}` for who runs a batch, `{mesh:artifacts}` for model artifacts,
`{mesh:news}` for what routers tell each other and `{mesh:<shard>}` for the block sets of the locations of one shard.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

NUM_SHARDS = 8
FORMAT = "v1"


def location_key(kind: str, location_id: str) -> str:
    """How a location is called in keys and messages, such as "worker/w1"."""
    return f"{kind}/{location_id}"


def life_key(kind: str, location_id: str, epoch: int) -> str:
    """How one life of a location is called, from its start to its end: what was learned of another does not count."""
    return f"{location_key(kind, location_id)}@{epoch}"


@dataclass(frozen=True, slots=True)
class RegistryKeys:
    """Keys of the registry."""

    incarnation: str
    members: str
    changes: str
    _tag: str

    def record(self, location: str) -> str:
        """The leased record of one location."""
        return f"{self._tag}:{FORMAT}:record:{location}"

    @property
    def record_prefix(self) -> str:
        """`record` without the location, for scripts that walk over the members."""
        return self.record("")


@dataclass(frozen=True, slots=True)
class GenerationKeys:
    """Keys of the generations of cleared tenants. followers: who follows them and how far."""

    incarnation: str
    table: str
    revision: str
    changes: str
    followers: str


@dataclass(frozen=True, slots=True)
class ControlKeys:
    """Keys of what operators have set."""

    incarnation: str
    table: str
    revision: str
    changes: str


@dataclass(frozen=True, slots=True)
class QuotaKeys:
    """Keys of what one tenant uses. leases: its requests in flight. gateways: who admits them."""

    buckets: str
    leases: str
    gateways: str


@dataclass(frozen=True, slots=True)
class UsageKeys:
    """Keys of what tenants have used."""

    _base: str

    def day(self, date: str) -> str:
        """Sums of a day; date: ISO."""
        return f"{self._base}:day:{date}"

    def ledger(self, ledger_id: str) -> str:
        """Number of the last batch of one gateway's ledger."""
        return f"{self._base}:ledger:{ledger_id}"

    def run(self, tag: str) -> str:
        """What was charged of a request with an idempotency key; tag: a hash of the run's name."""
        return f"{self._base}:run:{tag}"


@dataclass(frozen=True, slots=True)
class ArtifactKeys:
    """Keys of model artifacts. readers: who reads the shared storage now."""

    readers: str
    _base: str

    def holders(self, digest: str) -> str:
        """Addresses of workers that have the artifact in their cache."""
        return f"{self._base}:holders:{digest}"


@dataclass(frozen=True, slots=True)
class ShardKeys:
    """Keys of one shard of the location index."""

    shard: int
    incarnation: str
    members: str
    changes: str
    _tag: str

    def meta(self, location: str) -> str:
        """Epoch, sequence number and digest of a location's set."""
        return f"{self._tag}:{FORMAT}:meta:{location}"

    @property
    def meta_prefix(self) -> str:
        """`meta` without the location, for scripts that walk over the members."""
        return self.meta("")

    def blocks(self, location: str) -> str:
        """The hash block id -> tier."""
        return f"{self._tag}:{FORMAT}:blocks:{location}"

    def stage(self, location: str) -> str:
        """The set of a whole announcement until it is complete."""
        return f"{self._tag}:{FORMAT}:stage:{location}"


@dataclass(frozen=True, slots=True)
class KeySpace:
    """All keys of one mesh."""

    mesh: str = "kvmesh"
    num_shards: int = NUM_SHARDS

    def registry(self) -> RegistryKeys:
        """Keys of the registry."""
        tag = f"{{{self.mesh}:registry}}"
        base = f"{tag}:{FORMAT}"
        return RegistryKeys(f"{base}:incarnation", f"{base}:members", f"{base}:changes", tag)

    def generations(self) -> GenerationKeys:
        """Keys of the generations of cleared tenants."""
        base = f"{{{self.mesh}:generations}}:{FORMAT}"
        names = ("incarnation", "table", "revision", "changes", "followers")
        return GenerationKeys(*(f"{base}:{name}" for name in names))

    def control(self) -> ControlKeys:
        """Keys of what operators have set."""
        base = f"{{{self.mesh}:control}}:{FORMAT}"
        return ControlKeys(*(f"{base}:{name}" for name in ("incarnation", "table", "revision", "changes")))

    def quota(self, tenant_tag: bytes) -> QuotaKeys:
        """Keys of what one tenant uses; tenant_tag: see `blocks.tenant_tag`."""
        base = f"{{{self.mesh}:quota:{tenant_tag.hex()}}}:{FORMAT}"
        return QuotaKeys(*(f"{base}:{name}" for name in ("buckets", "leases", "gateways")))

    def usage(self) -> UsageKeys:
        """Keys of what tenants have used."""
        return UsageKeys(f"{{{self.mesh}:usage}}:{FORMAT}")

    def request(self, tag: str) -> str:
        """Record of a request with an idempotency key; tag: a keyed hash of tenant and key."""
        return f"{{{self.mesh}:request:{tag}}}:{FORMAT}:record"

    def batch(self, batch_id: str) -> str:
        """Lease of the gateway that runs a batch."""
        return f"{{{self.mesh}:batch:{batch_id}}}:{FORMAT}:lease"

    def artifacts(self) -> ArtifactKeys:
        """Keys of model artifacts."""
        base = f"{{{self.mesh}:artifacts}}:{FORMAT}"
        return ArtifactKeys(f"{base}:readers", base)

    @property
    def news(self) -> str:
        """Stream of what routers tell each other."""
        return f"{{{self.mesh}:news}}:{FORMAT}:news"

    def shard(self, number: int) -> ShardKeys:
        """Keys of one shard."""
        tag = f"{{{self.mesh}:{number}}}"
        base = f"{tag}:{FORMAT}"
        return ShardKeys(number, f"{base}:incarnation", f"{base}:members", f"{base}:changes", tag)

    def shard_of(self, location: str) -> ShardKeys:
        """Keys of the shard that a location belongs to."""
        return self.shard(zlib.crc32(location.encode()) % self.num_shards)
