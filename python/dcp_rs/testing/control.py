"""Operations on an embedded cluster, and fault injection."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from dcp_rs import _checks
from dcp_rs.exceptions import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dcp_rs import _dcp_rs

# The largest maxTTL of a server's collections, in seconds.
_MAX_TTL = 0x7FFF_FFFF


class MapVersion(NamedTuple):
    """Version of a cluster map: a tuple, which compares as clients compare versions."""

    epoch: int
    """Raised by an unsafe failover; `revEpoch` in the map."""
    revision: int
    """Raised by every other change, counted anew in each epoch; `rev` in the map."""


class Control:
    """Nodes, copies, collections and faults of a cluster."""

    __slots__ = ()

    _inner: _dcp_rs.EmbeddedCluster

    @property
    def num_nodes(self) -> int:
        """Number of nodes in the cluster."""
        return self._inner.num_nodes()

    def copies_of(self, vbucket: int) -> list[int]:
        """Returns the nodes of a vBucket, the active copy's node first.

        Raises:
            ConfigError: There is no such vBucket.
        """
        return self._inner.copies_of(_vbucket(vbucket))

    def persist(self) -> None:
        """Persists everything and evicts it from memory.

        A stream from the beginning then reads from disk, which has only the newest version of each
        key.
        """
        self._inner.persist()

    def purge(self, vbucket: int, to: int) -> None:
        """Persists everything, then purges the deletions of a vBucket up to seqno `to`.

        Raises:
            ConfigError: There is no such vBucket.
        """
        self._inner.purge(_vbucket(vbucket), _seqno("to", to))

    def roll_back(self, vbucket: int, to: int) -> None:
        """Rolls a vBucket back to seqno `to`, as an unclean failover does.

        Changes above `to` are lost, a new history branch starts there, and the vBucket's streams
        end. Unlike a failover, it can also discard what every copy has on disk, which readers with
        `persisted_only` otherwise count on.

        Raises:
            ConfigError: The vBucket does not exist, or the versions of that time are no longer
                kept.
        """
        self._inner.roll_back(_vbucket(vbucket), _seqno("to", to))

    def move_vbucket(self, vbucket: int, node: int) -> None:
        """Moves a vBucket to another node, numbered from 0, as a rebalance does.

        Raises:
            ConfigError: The vBucket or the node does not exist, one of the two nodes does not run,
                a fault keeps them from reaching each other, or the takeover fails, for example
                because the vBucket's state is "dead".
        """
        self._inner.move_vbucket(_vbucket(vbucket), _node(node))

    def failover(self, node: int, *, graceful: bool = False) -> None:
        """Fails over a node: replicas of its vBuckets become active.

        A hard failover treats the node as dead: it closes its connections and refuses new ones. Of
        each vBucket, the replica that has received the most (see `set_replica_lag`) is promoted. It
        starts a new history branch there, and a client that has read more must roll back. A vBucket
        without a replica is unavailable until the next `rebalance`, which recreates it empty.

        A graceful failover first sends everything to the replicas: histories continue, and streams
        end with "state changed". If a vBucket has no running replica, or its replica fails to take
        it over, the node stays in the cluster, without the vBuckets that were taken over already.

        To bring the node back, call `restart` and `rebalance`. Until then it stays out, even if the
        cluster is closed and started again from its data folder.

            >>> with EmbeddedCluster(nodes=2, replicas=1, vbuckets=1) as cluster:
            ...     _ = cluster.upsert("kept", "1")
            ...     cluster.set_replica_lag(0, 1, None)
            ...     _ = cluster.upsert("lost", "2")
            ...     cluster.failover(0)
            ...     cluster.get("kept") is None, cluster.get("lost") is None
            (False, True)

        Raises:
            ConfigError: The node does not exist, has already been failed over or is the last one.
                For a graceful failover, also: it is not running, a fault keeps two nodes from
                reaching each other, a vBucket has no running replica, or a takeover fails.
        """
        _checks.flag("graceful", graceful)
        self._inner.failover(_node(node), graceful)

    def failover_unsafely(self, nodes: Iterable[int]) -> None:
        """Fails over a majority of the nodes, as an unsafe failover does.

        It is a hard failover of each node, and the cluster map starts a new epoch (`revEpoch`).

        Raises:
            ConfigError: A node does not exist or has already been failed over, or no node would be
                left.
        """
        numbers = _checks.items("nodes", nodes, "a list of nodes")
        for number in numbers:
            _checks.integer("nodes", number, 0, 0xFFFF)
        self._inner.failover_unsafely(cast("list[int]", numbers))

    @property
    def map_version(self) -> MapVersion:
        """Version of the cluster map; every change increases it."""
        return self._inner.map_version()

    def kill(self, node: int) -> None:
        """Stops a node at once, like a crash: unpersisted changes are lost.

        Its connections close and it refuses new ones. The cluster map stays the same.

        Raises:
            ConfigError: There is no such node.
        """
        self._inner.kill(_node(node))

    def restart(self, node: int, *, clean: bool = True) -> None:
        """Restarts a node, or starts a stopped one.

        After a clean restart, histories continue. After an unclean one, and always after `kill`,
        the node has only what was persisted, and reuses the seqnos above on new history branches.

        Raises:
            ConfigError: The node does not exist, or cannot reopen its ports.
        """
        _checks.flag("clean", clean)
        self._inner.restart(_node(node), clean)

    def add_node(self) -> int:
        """Adds a node and returns its number. It has no vBuckets until the next `rebalance`.

        Raises:
            ConnectError: The node cannot listen on a port.
        """
        return self._inner.add_node()

    def rebalance(self) -> None:
        """Distributes the vBuckets and their replicas evenly over the running nodes.

        It includes nodes that were added, or failed over and restarted. Histories continue; streams
        of moved vBuckets end with "state changed".

        Raises:
            ConfigError: A node of the cluster is not running, a fault keeps two nodes from reaching
                each other, or a takeover fails, for example because the vBucket's state is "dead":
                that vBucket stays where it is.
        """
        self._inner.rebalance()

    def set_replica_lag(self, vbucket: int, replica: int, lag: int | None) -> None:
        """Sets how many changes a replica stays behind.

        A failover of the active copy's node loses the changes that the promoted replica lacks.

        Args:
            vbucket: vBucket concerned.
            replica: Its replica, from 1.
            lag: Number of changes, at first 0. With `None`, it applies no change from now on.

        Raises:
            ConfigError: There is no such vBucket or replica.
        """
        if lag is not None:
            _seqno("lag", lag)
        _checks.integer("replica", replica, 1, 3)
        self._inner.set_replica_lag(_vbucket(vbucket), replica, lag)

    def hold_persistence(self, vbucket: int, copy: int = 0, *, hold: bool = True) -> None:
        """Keeps one copy of a vBucket from persisting, or lets it persist again.

        Args:
            vbucket: vBucket concerned.
            copy: 0 for the active copy, 1 for the first replica.
            hold: Whether to hold persistence or resume it.

        Raises:
            ConfigError: There is no such vBucket or copy.
        """
        _checks.integer("copy", copy, 0, 3)
        _checks.flag("hold", hold)
        self._inner.hold_persistence(_vbucket(vbucket), copy, hold)

    def drop_bucket(self) -> None:
        """Drops the first bucket and closes all connections to it.

        Raises:
            ConfigError: There is none.
        """
        self._inner.drop_bucket()

    def create_bucket(self) -> None:
        """Recreates the first bucket, empty and with a new UUID.

        Raises:
            ConfigError: The bucket exists.
        """
        self._inner.create_bucket()

    def flush_bucket(self) -> None:
        """Empties the first bucket; its scopes and collections remain.

        As on a server, every vBucket starts over with a new history, so that streams end with
        "state changed" and their readers roll back to the beginning.

        Raises:
            ConfigError: There is no bucket.
        """
        self._inner.flush_bucket()

    def create_scope(self, scope: str) -> None:
        """Creates a scope.

        Raises:
            ConfigError: The scope exists, or its name is not allowed.
        """
        _checks.text("scope", scope)
        self._inner.create_scope(scope)

    def create_collection(self, collection: str, *, max_ttl: int | None = None) -> None:
        """Creates a collection.

            >>> with EmbeddedCluster() as cluster:
            ...     cluster.create_scope("inventory")
            ...     cluster.create_collection("inventory.airline")
            ...     _ = cluster.upsert("airline_10", {}, collection="inventory.airline")
            ...     cluster.collections()
            {'_default': ['_default'], 'inventory': ['airline']}

        Args:
            collection: Its name, as `scope.collection`, or as `collection` within `_default`.
            max_ttl: Maximum lifetime of its documents, in seconds, below 2**31.

        Raises:
            ConfigError: The collection exists, its name is not allowed, or its scope does not
                exist.
        """
        scope, name = _path(collection)
        if max_ttl is not None:
            _checks.integer("max_ttl", max_ttl, 0, _MAX_TTL)
        self._inner.create_collection(scope, name, max_ttl)

    def modify_collection(
        self, collection: str, *, max_ttl: int | None = None, history: bool = False
    ) -> None:
        """Changes settings of a collection; documents written before stay as they are.

        Args:
            collection: Its name, as `scope.collection`, or as `collection` within `_default`.
            max_ttl: Maximum lifetime of its documents, in seconds, below 2**31; `None` removes it.
            history: Whether it is marked to keep every version of its documents.

        Raises:
            ConfigError: There is no such collection.
        """
        scope, name = _path(collection)
        if max_ttl is not None:
            _checks.integer("max_ttl", max_ttl, 0, _MAX_TTL)
        _checks.flag("history", history)
        self._inner.modify_collection(scope, name, max_ttl, history)

    def flush_collection(self, collection: str) -> None:
        """Empties a collection: its documents are gone without a deletion for each.

        Args:
            collection: Its name, as `scope.collection`, or as `collection` within `_default`.

        Raises:
            ConfigError: There is no such collection.
        """
        self._inner.flush_collection(*_path(collection))

    def drop_scope(self, scope: str) -> None:
        """Drops a scope with everything in it.

        Raises:
            ConfigError: There is none, or it is the default scope.
        """
        _checks.text("scope", scope)
        self._inner.drop_scope(scope)

    def drop_collection(self, collection: str) -> None:
        """Drops a collection, as `scope.collection`, with everything in it.

        The default collection never comes back.

        Raises:
            ConfigError: There is none.
        """
        self._inner.drop_collection(*_path(collection))

    def collections(self) -> dict[str, list[str]]:
        """Returns the names of the collections by scope."""
        return {
            scope["name"]: [collection["name"] for collection in scope["collections"]]
            for scope in self.manifest()["scopes"]
        }

    def manifest(self) -> dict[str, Any]:
        """Returns the collections manifest, as sent to clients."""
        manifest: dict[str, Any] = json.loads(self._inner.manifest())
        return manifest

    def set_faults(self, rules: Iterable[Mapping[str, object]]) -> None:
        """Injects faults, replacing all earlier rules.

        A rule has a `reaction` and, unless it applies to every packet, a `condition`; the guide to
        faults describes both. Rules apply from the next packet of each connection, even while
        clients are connected. Only the first rule that matches a packet reacts to it.

            >>> with EmbeddedCluster(vbuckets=1) as cluster:
            ...     _ = cluster.upsert("a", "1")
            ...     cluster.set_faults(
            ...         [
            ...             {
            ...                 "condition": {"opcode": "DCP_STREAM_REQ", "nth": 1},
            ...                 "reaction": {"answer": {"status": "ETMPFAIL"}},
            ...             }
            ...         ]
            ...     )
            ...     with cluster.connect() as client:  # which retries
            ...         changes = sum(batch.num_rows for batch in client.stream(until="now"))
            ...     changes, cluster.fault_counts()
            (1, [1])

        With `between`, a rule is about the replication of every bucket, here of a partitioned
        cluster:

            >>> with EmbeddedCluster(nodes=3, replicas=2, vbuckets=1) as cluster:
            ...     cluster.set_faults(
            ...         [{"condition": {"between": [[0], [1, 2]]}, "reaction": "disconnect"}]
            ...     )
            ...     _ = cluster.upsert("a", "1")
            ...     cluster.failover(0)  # nodes 1 and 2 have not received the document
            ...     cluster.get("a") is None
            True

        Args:
            rules: The rules; an empty list removes all.

        Raises:
            ConfigError: A name is unknown, or a rule contradicts itself. The text names the member,
                and suggests what was probably meant. The earlier rules stay in force.
        """
        given = _checks.items("rules", rules, "a list of rules")
        for rule in given:
            _checks.instance("rules", rule, Mapping, "a list of mappings")
        try:
            text = json.dumps([dict(cast("Mapping[str, object]", rule)) for rule in given])
        except (TypeError, ValueError) as error:
            raise ConfigError(f"are not JSON: {error}", option="rules") from error
        self._inner.set_faults(text)

    def faults(self) -> list[dict[str, Any]]:
        """Returns the fault rules in force."""
        rules: list[dict[str, Any]] = json.loads(self._inner.faults())
        return rules

    def fault_counts(self) -> list[int]:
        """Returns how often each rule of `faults` has reacted since it was set."""
        return self._inner.fault_counts()


def _vbucket(vbucket: int) -> int:
    _checks.integer("vbucket", vbucket, 0, 0xFFFF)
    return vbucket


def _node(node: int) -> int:
    _checks.integer("node", node, 0, 0xFFFF)
    return node


def _seqno(name: str, seqno: int) -> int:
    _checks.integer(name, seqno, 0, (1 << 64) - 1)
    return seqno


def _path(collection: str) -> tuple[str, str]:
    """Splits `scope.collection`; a name alone is a collection of the default scope."""
    _checks.text("collection", collection)
    scope, dot, name = collection.partition(".")
    return (scope, name) if dot else ("_default", scope)
