"""What a target reads back is what was written, for every type of field and several readers."""

import os
import random
import zlib

import pytest

import dcp_rs
import field_values
import readers
import replicas
from dcp_rs.exceptions import ConfigError

SEED = int(os.environ.get("DCP_VALUES_SEED", "1"))
KEPT = ["duckdb-table", "postgres-table", "delta-table", "parquet-log", "iceberg-log"]
KEPT = [f"{kind}-table" for kind in replicas.CHOSEN] or KEPT
HUGE = "\N{GRINNING FACE}" * (1 << 18)


@pytest.fixture(params=KEPT)
def replica(request, tmp_path):
    return replicas.make(request.param, request, tmp_path)


@pytest.fixture
def cluster():
    with dcp_rs.testing.EmbeddedCluster(vbuckets=2) as running:
        yield running


def named(kinds):
    return {f"c{n}": kind for n, kind in enumerate(kinds)}


class Kept:
    """Documents of a cluster, and a replica that is compared with them by every reader."""

    def __init__(self, cluster, replica, kinds):
        self.cluster, self.replica, self.kinds = cluster, replica, kinds
        self.schema = ", ".join(f"{name} {kind}" for name, kind in kinds.items())
        self.documents = {}

    def write(self, documents):
        for key, text in documents.items():
            self.cluster.upsert(key, text.encode())
        self.documents |= documents

    def remove(self, keys):
        for key in keys:
            self.cluster.remove(key)
            del self.documents[key]

    def replicate(self):
        options = {"mode": self.replica.mode, "document_schema": self.schema}
        with self.cluster.connect() as client:
            dcp_rs.replicate(client, self.replica.url, once=True, **options)

    def check(self):
        self.replicate()
        # DuckDB takes a zero for the one before it when it compresses a column.
        signs_of_zeros = not isinstance(self.replica, replicas.InDuckDB)
        for name, read in readers.of(self.replica).items():
            rows = readers.newest(read(self.replica), self.replica.mode)
            told = field_values.differences(
                self.kinds, self.documents, rows, signs_of_zeros=signs_of_zeros
            )
            assert not told, f"{name}, seed {SEED}:\n" + "\n".join(told)


def keep(cluster, replica, kinds):
    """Loads documents, updates them, removes half of them, and writes all again."""
    chance = random.Random(SEED + zlib.crc32(repr(kinds).encode()))
    kept = Kept(cluster, replica, named(kinds))
    for step in range(3):
        if step == 2:
            kept.remove([*kept.documents][::2])
            kept.check()
        kept.write(field_values.documents(kept.kinds, chance, step))
        kept.check()


def test_every_type_is_read_back(cluster, replica):
    kinds = field_values.SCALARS + field_values.LISTS
    if not isinstance(replica, replicas.InPostgres):
        kinds = kinds + field_values.NESTED
        if not isinstance(replica, replicas.InIceberg):
            kinds = kinds + field_values.OF_STRUCTS
    keep(cluster, replica, kinds)


@pytest.mark.parametrize("kind", field_values.OF_STRUCTS, ids=repr)
def test_what_pyiceberg_makes_something_else_of_is_refused(cluster, tmp_path, kind):
    replica = replicas.InIceberg(tmp_path)
    replica.mode = "log"
    inner = field_values.Struct(a=field_values.Array(field_values.Map(kind)))
    for each in (kind, inner):
        with pytest.raises(ConfigError, match=r"^document_schema: c0 .* MAP of STRUCT"):
            Kept(cluster, replica, named([each])).replicate()
    assert not (tmp_path / "iceberg" / "default").exists()


# In parts: a row of PostgreSQL has at most 8 KiB, and time grows with the square of the columns.
@pytest.mark.parametrize("part", range(4))
def test_every_precision_and_scale_is_read_back(cluster, replica, part):
    keep(cluster, replica, field_values.DECIMALS[part::4])


def test_a_mebibyte_of_text_is_read_back(cluster, replica):
    kept = Kept(cluster, replica, named([field_values.String(), field_values.Binary()]))
    for text in (HUGE, HUGE[::-1] + "\\n", "short", HUGE):
        kept.write({"huge": f'{{"c0":"{text}","c1":"{"A" * (1 << 20)}"}}'})
        kept.check()
