"""Calls of the Couchbase SDK that read and write documents."""

import time
from datetime import timedelta

import pytest
from couchbase.durability import (
    ClientDurability,
    DurabilityLevel,
    PersistTo,
    ReplicateTo,
    ServerDurability,
)
from couchbase.exceptions import (
    AmbiguousTimeoutException,
    CASMismatchException,
    DocumentExistsException,
    DocumentLockedException,
    DocumentNotFoundException,
    DocumentNotLockedException,
    DurabilityImpossibleException,
    PathExistsException,
    PathNotFoundException,
)
from couchbase.options import (
    AppendOptions,
    DecrementOptions,
    DeltaValue,
    GetOptions,
    IncrementOptions,
    InsertOptions,
    MutateInOptions,
    PrependOptions,
    RemoveOptions,
    ReplaceOptions,
    SignedInt64,
    UpsertOptions,
)
from couchbase.subdocument import (
    LookupInMacro,
    MutationMacro,
    StoreSemantics,
    array_addunique,
    array_append,
    array_insert,
    array_prepend,
    count,
    counter,
    exists,
    get,
    insert,
    remove,
    replace,
    upsert,
)
from couchbase.transcoder import RawBinaryTranscoder, RawStringTranscoder

from dcp_rs.testing import EmbeddedCluster
from sdk_case import HOUR, call, open_sdk


@call("`get`, `upsert`, `insert`, `replace`, `remove`")
def _(case):
    collection, key = case.collection, case.key
    assert collection.upsert(key, {"n": 1}).cas
    assert case.value == {"n": 1}
    with pytest.raises(DocumentExistsException):
        collection.insert(key, {})
    collection.replace(key, {"n": 2})
    assert case.value == {"n": 2}
    collection.remove(key)
    with pytest.raises(DocumentNotFoundException):
        collection.replace(key, {})
    with pytest.raises(DocumentNotFoundException):
        collection.get(key)


@call("`replace` and `remove` with a CAS")
def _(case):
    collection, key = case.collection, case.key
    first = collection.insert(key, {"n": 1})
    second = collection.replace(key, {"n": 2}, ReplaceOptions(cas=first.cas))
    with pytest.raises(CASMismatchException):
        collection.replace(key, {"n": 3}, ReplaceOptions(cas=first.cas))
    with pytest.raises(CASMismatchException):
        collection.remove(key, RemoveOptions(cas=first.cas))
    collection.remove(key, RemoveOptions(cas=second.cas))


@call("`exists`")
def _(case):
    assert not case.collection.exists(case.key).exists
    cas = case.collection.upsert(case.key, {}).cas
    found = case.collection.exists(case.key)
    assert (found.exists, found.cas) == (True, cas)


@call("`get` with a projection")
def _(case):
    case.collection.upsert(case.key, {"a": {"b": 1, "c": 2}, "d": 3})
    found = case.collection.get(case.key, GetOptions(project=["a.b", "d"]))
    assert found.content_as[dict] == {"a": {"b": 1}, "d": 3}


def seconds_left(case):
    """Until the document expires; `None` if never."""
    found = case.collection.get(case.key, GetOptions(with_expiry=True))
    assert found.content_as[dict] == {"n": 1}
    return found.expiryTime and found.expiryTime.timestamp() - time.time()


@call("`expiry`, `get` with the expiry, `preserve_expiry`")
def _(case):
    case.collection.upsert(case.key, {"n": 1}, UpsertOptions(expiry=HOUR))
    assert 3500 < seconds_left(case) < 3700
    case.collection.upsert(case.key, {"n": 1}, UpsertOptions(preserve_expiry=True))
    assert 3500 < seconds_left(case) < 3700
    case.collection.upsert(case.key, {"n": 1})
    assert seconds_left(case) is None


@call("`touch`, `get_and_touch`")
def _(case):
    case.collection.upsert(case.key, {"n": 1})
    case.collection.touch(case.key, HOUR)
    assert 3500 < seconds_left(case) < 3700
    assert case.collection.get_and_touch(case.key, 2 * HOUR).content_as[dict] == {"n": 1}
    assert 7100 < seconds_left(case) < 7300
    case.collection.touch(case.key, timedelta(0))
    assert seconds_left(case) is None


@call("`get_and_lock`, `unlock`")
def _(case):
    collection, key = case.collection, case.key
    collection.upsert(key, {"n": 1})
    locked = collection.get_and_lock(key, timedelta(seconds=15))
    assert locked.content_as[dict] == {"n": 1}
    collection.replace(key, {"n": 2}, ReplaceOptions(cas=locked.cas))
    locked = collection.get_and_lock(key, timedelta(seconds=15))
    # The SDK tries again until the time-out.
    options = RemoveOptions(timeout=timedelta(milliseconds=100))
    with pytest.raises((AmbiguousTimeoutException, DocumentLockedException)):
        collection.remove(key, options)
    collection.unlock(key, locked.cas)
    with pytest.raises(DocumentNotLockedException):
        collection.unlock(key, locked.cas)
    collection.remove(key)


@call("`get_multi`, `upsert_multi` and the other `_multi` calls")
def _(case):
    documents = {f"{case.key}-{n}": {"n": n} for n in range(50)}
    collection = case.collection
    assert collection.insert_multi(documents).all_ok
    assert collection.upsert_multi(documents).all_ok
    assert collection.replace_multi(documents).all_ok
    assert collection.touch_multi(list(documents), HOUR).all_ok
    assert all(each.exists for each in collection.exists_multi(list(documents)).results.values())
    found = collection.get_multi(list(documents)).results
    assert {key: each.content_as[dict] for key, each in found.items()} == documents
    locked = collection.get_and_lock_multi(list(documents), timedelta(seconds=15))
    assert locked.all_ok
    assert set(collection.unlock_multi(locked).values()) == {None}
    assert collection.remove_multi(list(documents)).all_ok
    assert not collection.get_multi(list(documents)).all_ok


@call("transcoders for text and bytes")
def _(case):
    for transcoder, value in (
        (RawStringTranscoder(), "ü"),
        (RawBinaryTranscoder(), b"\0\xff"),
    ):
        case.collection.upsert(case.key, value, UpsertOptions(transcoder=transcoder))
        found = case.collection.get(case.key, GetOptions(transcoder=transcoder))
        assert found.value == value


@call("`binary().increment`, `decrement`")
def _(case):
    counters, key = case.collection.binary(), case.key
    initial = SignedInt64(10)
    assert counters.increment(key, IncrementOptions(initial=initial)).content == 10
    assert counters.increment(key, IncrementOptions(delta=DeltaValue(5))).content == 15
    assert counters.decrement(key, DecrementOptions(delta=DeltaValue(7))).content == 8
    assert counters.decrement(key, DecrementOptions(delta=DeltaValue(9))).content == 0
    assert case.collection.get(key).content_as[int] == 0


@call("`binary().append`, `prepend`")
def _(case):
    raw = RawBinaryTranscoder()
    case.collection.upsert(case.key, b"b", UpsertOptions(transcoder=raw))
    case.collection.binary().append(case.key, b"c", AppendOptions())
    case.collection.binary().prepend(case.key, b"a", PrependOptions())
    assert case.collection.get(case.key, GetOptions(transcoder=raw)).value == b"abc"


@call("`lookup_in`")
def _(case):
    case.collection.upsert(case.key, {"a": {"b": [1, 2]}})
    assert case.parts(get("a.b[-1]"), exists("a"), exists("z"), count("a.b"), get("")) == [
        2,
        True,
        False,
        2,
        {"a": {"b": [1, 2]}},
    ]
    with pytest.raises(PathNotFoundException):
        case.parts(get("z"))


@call("`mutate_in`")
def _(case):
    case.collection.upsert(case.key, {"a": 1, "gone": 1, "list": [2]})
    found = case.collection.mutate_in(
        case.key,
        [
            insert("b.c", 1, create_parents=True),
            upsert("d", 1),
            replace("a", 2),
            remove("gone"),
            array_append("list", 3),
            array_prepend("list", 1),
            array_insert("list[3]", 4),
            array_addunique("list", 5),
            counter("n", 7, create_parents=True),
        ],
    )
    assert found.content_as[int](8) == 7
    expected = {"a": 2, "list": [1, 2, 3, 4, 5], "b": {"c": 1}, "d": 1, "n": 7}
    assert case.value == expected
    with pytest.raises(PathExistsException):
        case.collection.mutate_in(case.key, [remove("d"), insert("a", 1)])
    assert case.value == expected


@call("`mutate_in` with `StoreSemantics`, CAS and expiry")
def _(case):
    change, collection, key = [upsert("n", 1)], case.collection, case.key
    with pytest.raises(DocumentNotFoundException):
        collection.mutate_in(key, change)
    options = MutateInOptions(store_semantics=StoreSemantics.INSERT, expiry=HOUR)
    first = collection.mutate_in(key, change, options)
    assert 3500 < seconds_left(case) < 3700
    with pytest.raises(DocumentExistsException):
        collection.mutate_in(key, change, options)
    options = MutateInOptions(cas=first.cas, preserve_expiry=True)
    collection.mutate_in(key, change, options)
    assert 3500 < seconds_left(case) < 3700
    with pytest.raises(CASMismatchException):
        collection.mutate_in(key, change, options)
    collection.remove(key)
    collection.mutate_in(key, change, MutateInOptions(store_semantics=StoreSemantics.UPSERT))


@call("extended attributes and macros")
def _(case):
    written = case.collection.upsert(case.key, {"n": 1}, UpsertOptions(expiry=HOUR))
    token = written.mutation_token()
    assert case.parts(get(LookupInMacro.seq_no(), xattr=True)) == [f"{token.sequence_number:#018x}"]
    changes = [
        upsert("_meta.by", "me", xattr=True, create_parents=True),
        upsert("_meta.cas", MutationMacro.cas(), xattr=True, create_parents=True),
        upsert("n", 2),
    ]
    cas = case.collection.mutate_in(case.key, changes).cas
    by, version = case.parts(get("_meta.by", xattr=True), get("_meta.cas", xattr=True))
    assert (by, version) == ("me", f"0x{cas.to_bytes(8, 'little').hex()}")
    assert case.value == {"n": 2}


@call("`couchbase_list`, `couchbase_map`, `couchbase_set`, `couchbase_queue`")
def _(case):
    things = case.collection.couchbase_list(f"{case.key}-list")
    things.append("b")
    things.prepend("a")
    assert [things.get_at(0), things.get_at(1), things.size()] == ["a", "b", 2]
    names = case.collection.couchbase_map(f"{case.key}-map")
    names.add("a", 1)
    assert (names.get("a"), names.exists("b")) == (1, False)
    known = case.collection.couchbase_set(f"{case.key}-set")
    known.add("a")
    assert known.contains("a")
    queue = case.collection.couchbase_queue(f"{case.key}-queue")
    queue.push("a")
    queue.push("b")
    assert queue.pop() == "a"


@call("`get_any_replica`, `get_all_replicas`")
def _(case):
    case.collection.upsert(case.key, {"n": 1})
    assert case.collection.get_any_replica(case.key).content_as[dict] == {"n": 1}
    found = case.collection.get_all_replicas(case.key)
    assert sorted((each.is_replica, each.content_as[dict]["n"]) for each in found) == [
        (False, 1),
        (True, 1),
    ]


@call("`lookup_in_any_replica`, `lookup_in_all_replicas`")
def _(case):
    case.collection.upsert(case.key, {"n": 1})
    paths = [get("n")]
    assert case.collection.lookup_in_any_replica(case.key, paths).content_as[int](0) == 1
    found = case.collection.lookup_in_all_replicas(case.key, paths)
    assert sorted((each.is_replica, each.content_as[int](0)) for each in found) == [
        (False, 1),
        (True, 1),
    ]


def write_durably(case, durability):
    """Every kind of write; each is on the replica when it returns."""
    collection, key = case.collection, case.key
    counters, number = collection.binary(), f"{key}-number"

    def on_replica(name):
        copies = collection.get_all_replicas(name)
        return {each.content_as[str] for each in copies if each.is_replica}

    collection.insert(key, {"n": 1}, InsertOptions(durability=durability))
    assert on_replica(key) == {"{'n': 1}"}
    collection.replace(key, {"n": 2}, ReplaceOptions(durability=durability))
    assert on_replica(key) == {"{'n': 2}"}
    collection.upsert(key, {"n": 3}, UpsertOptions(durability=durability))
    assert on_replica(key) == {"{'n': 3}"}
    collection.mutate_in(key, [upsert("n", 4)], MutateInOptions(durability=durability))
    assert on_replica(key) == {"{'n': 4}"}
    collection.remove(key, RemoveOptions(durability=durability))
    with pytest.raises(DocumentNotFoundException):
        on_replica(key)
    initial = SignedInt64(1)
    counters.increment(number, IncrementOptions(initial=initial, durability=durability))
    counters.increment(number, IncrementOptions(durability=durability))
    assert on_replica(number) == {"2"}
    counters.decrement(number, DecrementOptions(durability=durability))
    counters.append(number, b"0", AppendOptions(durability=durability))
    counters.prepend(number, b"2", PrependOptions(durability=durability))
    assert on_replica(number) == {"210"}


@call("`ServerDurability(MAJORITY)`")
def _(case):
    write_durably(case, ServerDurability(DurabilityLevel.MAJORITY))


@call("`ServerDurability(MAJORITY_AND_PERSIST_TO_ACTIVE)`")
def _(case):
    write_durably(case, ServerDurability(DurabilityLevel.MAJORITY_AND_PERSIST_TO_ACTIVE))


@call("`ServerDurability(PERSIST_TO_MAJORITY)`")
def _(case):
    write_durably(case, ServerDurability(DurabilityLevel.PERSIST_TO_MAJORITY))


@call("`ServerDurability` with too few nodes: `DurabilityImpossibleException`")
def _(case):
    majority = UpsertOptions(durability=ServerDurability(DurabilityLevel.MAJORITY))
    with EmbeddedCluster(replicas=1) as lonely:
        sdk = open_sdk(lonely)
        with pytest.raises(DurabilityImpossibleException):
            sdk.bucket("default").default_collection().upsert(case.key, {}, majority)
        sdk.close()


@call("`ClientDurability`")
def _(case):
    # The SDK asks for what it waits for twice a second.
    durability = ClientDurability(ReplicateTo.ONE, PersistTo.ONE)
    case.collection.upsert(case.key, {"n": 1}, UpsertOptions(durability=durability))
    (replica,) = (each for each in case.collection.get_all_replicas(case.key) if each.is_replica)
    assert replica.content_as[dict] == {"n": 1}
    case.collection.remove(case.key, RemoveOptions(durability=durability))
