"""A reader that is killed again and again, into a store that keeps rows and checkpoint together."""

import os
import random
import signal
import sqlite3
import subprocess

# One transaction per batch: its rows and the checkpoint after it. A change that came twice would
# break the table's primary key and end the program.
_READ = """
import sqlite3, sys
import dcp_rs
connection_string, path, until = sys.argv[1:]
store = sqlite3.connect(path)
store.execute("PRAGMA synchronous = OFF")
store.execute(
    "CREATE TABLE IF NOT EXISTS changes (vbucket, epoch, seqno, key, value,"
    " PRIMARY KEY (vbucket, epoch, seqno))")
store.execute("CREATE TABLE IF NOT EXISTS checkpoint (only INTEGER PRIMARY KEY, json TEXT)")
found = store.execute("SELECT json FROM checkpoint").fetchone()
start = dcp_rs.Checkpoint.from_json(found[0]) if found else "earliest"
client = dcp_rs.connect(
    connection_string, bucket="default", username="Administrator", password="canary-8f1c2e")
policy = dcp_rs.BatchPolicy(max_rows=7, linger=0.001)
for batch in client.stream(start=start, until=until or None, batch=policy):
    with store:
        store.executemany(
            "INSERT INTO changes VALUES (:vbucket, :epoch, :seqno, :key, :value)", batch.rows())
        store.execute(
            "INSERT OR REPLACE INTO checkpoint VALUES (1, ?)", [batch.checkpoint.to_json()])
    print(batch.num_rows, flush=True)
"""


def test_a_store_of_rows_and_checkpoint_has_each_change_once_whenever_its_reader_is_killed(
    cluster, start_python, tmp_path
):
    kills = int(os.environ.get("DCP_KILLS", "20"))
    seed = int(os.environ.get("DCP_KILLS_SEED", "1"))
    chance, path, written = random.Random(seed), tmp_path / "store.sqlite", {}
    for _ in range(kills):
        for _ in range(60):
            key, value = f"key-{len(written)}", b'{"n":%d}' % len(written)
            cluster.upsert(key, value)
            written[key] = value
        reader = start_python(_READ, cluster.connection_string, path, "")
        for _ in range(chance.randrange(1, 6)):
            line = reader.stdout.readline()
            assert line.strip(), reader.communicate()[1]
        # Somewhere between taking a batch, storing it and asking for the next.
        try:
            reader.wait(timeout=chance.random() * 0.01)
        except subprocess.TimeoutExpired:
            reader.send_signal(signal.SIGKILL)
        assert reader.wait(timeout=30) == -signal.SIGKILL, reader.communicate()[1]

    last = start_python(_READ, cluster.connection_string, path, "now")
    _, error = last.communicate(timeout=120)
    assert last.returncode == 0, error
    changes = sqlite3.connect(path).execute("SELECT key, value FROM changes").fetchall()
    assert len(changes) == len(written), f"seed {seed}: lost or doubled"
    assert dict(changes) == written, f"seed {seed}"
