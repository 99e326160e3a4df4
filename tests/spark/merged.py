"""Runs the guide's program that keeps a table of documents: for `on_version.py`.

The text of the program is the guide's own. The table is compared with what the cluster holds after
batches that ran again, after changes that were lost, and after both.
"""

import json
import os
import re
import sys
import tempfile
from pathlib import Path
from textwrap import indent

import dcp_rs

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "spark.md"
KEYS = [f"key_{n}" for n in range(40)]


def program(*, of_delta_rs):
    """The guide's program up to where its query starts."""
    text = GUIDE.read_text()
    section = text[text.index("### Keeping a table") : text.index("### Jobs that run now and then")]
    whole, create, merge = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    code, started, _ = whole.partition("changes.writeStream")
    assert started
    if not of_delta_rs:
        return code
    for pattern, replacement in {
        r"^from delta.tables .*\n": "import deltalake\nimport dcp_rs\n",
        r"^DeltaTable.createIfNotExists.*\n": create,
        r"DeltaTable.forName.*\n": 'deltalake.DeltaTable("documents")\n',
        r"^    \(\n        table.alias.*?^    \)\n": indent(merge, "    "),
    }.items():
        flags = re.MULTILINE | (re.DOTALL if "alias" in pattern else 0)
        code, count = re.subn(pattern, lambda _, text=replacement: text, code, flags=flags)
        assert count == 1, pattern
    return code


class Kept:
    """The table, the query that keeps it, and the cluster it is kept after."""

    def __init__(self, spark, folder, *, of_delta_rs):
        self.cluster = dcp_rs.testing.EmbeddedCluster(vbuckets=1, bucket="merged")
        options = {
            "connectionString": self.cluster.connection_string,
            "username": "Administrator",
            "password": "password",
            "bucket": "merged",
            "documentSchema": "n INT",
        }
        self.of_delta_rs, self.spark = of_delta_rs, spark
        self.checkpoint = Path(folder, "merged")
        self.names = {"spark": spark, "options": options}
        exec(program(of_delta_rs=of_delta_rs), self.names)

    def write(self, first, last, n):
        """Writes documents and removes every fifth of them."""
        for key in KEYS[first:last]:
            self.cluster.upsert(key, {"n": n})
        for key in KEYS[first:last:5]:
            self.cluster.remove(key)
        self.cluster.persist()

    def run(self):
        """Lets the query do what there is to do; compares."""
        writer = self.names["changes"].writeStream.foreachBatch(self.names["upsert"])
        writer = writer.option("checkpointLocation", str(self.checkpoint))
        query = writer.trigger(availableNow=True).start()
        assert query.awaitTermination(120)
        assert self.table() == self.truth()
        sys.stdout.write(f"  the table is right with {len(self.truth())} documents\n")
        sys.stdout.flush()

    def forget_commit(self):
        """Has the last batch run again, as if the driver had died at its end."""
        last = max(int(path.name) for path in (self.checkpoint / "commits").glob("[0-9]*"))
        for path in (self.checkpoint / "commits").glob(f"*{last}*"):
            path.unlink()

    def table(self):
        if self.of_delta_rs:
            import deltalake

            rows = deltalake.DeltaTable("documents").to_pyarrow_table().to_pylist()
        else:
            rows = [row.asDict() for row in self.spark.table("documents").collect()]
        assert len({row["key"] for row in rows}) == len(rows)
        return {row["key"]: row["n"] for row in rows if row["op"] == "mutation"}

    def truth(self):
        found = {key: self.cluster.get(key) for key in KEYS}
        return {key: json.loads(each.value)["n"] for key, each in found.items() if each is not None}


def keep(spark, *, of_delta_rs):
    """Lets everything happen to a table that the guide tells of."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        kept = Kept(spark, folder, of_delta_rs=of_delta_rs)
        kept.write(0, 20, 1)
        kept.run()
        kept.write(5, 25, 2)
        kept.run()
        # A batch again, of whose keys some were rewritten, removed and made again meanwhile.
        kept.forget_commit()
        kept.write(8, 18, 3)
        kept.write(5, 6, 4)
        kept.run()
        before = kept.cluster.high_seqnos()[0]
        kept.write(10, 30, 5)
        kept.run()
        # What was read is lost, and others are written in its place.
        kept.cluster.roll_back(0, before)
        kept.write(12, 16, 6)
        kept.run()
        kept.forget_commit()
        kept.run()
        # A batch is to run again whose end is lost.
        before = kept.cluster.high_seqnos()[0]
        kept.write(20, 40, 7)
        kept.run()
        kept.forget_commit()
        kept.cluster.roll_back(0, before + 3)
        kept.write(22, 30, 8)
        kept.run()
        kept.cluster.close()
