"""A Kafka broker for tests, and what a consumer of it sees."""

import base64
import os
import socket
import subprocess
import time
import uuid
from pathlib import Path

from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec

# Seconds until a commit, which was answered before, is seen at the latest.
_SETTLED = 10.0
# Of the version in tests/kafka/pom.xml, or of the one that `make long` tries.
_JARS = Path(__file__).parents[2] / ".state" / os.environ.get("DCP_KAFKA", "kafka")
_PROPERTIES = r"""
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl},\
CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,\
CONTROLLER:PLAINTEXT
sasl.enabled.mechanisms=PLAIN
listener.name.sasl_plaintext.plain.sasl.jaas.config=\
org.apache.kafka.common.security.plain.PlainLoginModule required user_limited="canary-8f1c2e" ;
authorizer.class.name=org.apache.kafka.metadata.authorizer.StandardAuthorizer
super.users=User:ANONYMOUS
log.dirs={folder}/data
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
transaction.abort.timed.out.transaction.cleanup.interval.ms=200
auto.create.topics.enable=false
log.cleaner.dedupe.buffer.size=4194304
log.cleaner.backoff.ms=500
log.flush.interval.messages=9223372036854775807
"""


class Broker:
    """A broker in a process of its own, in KRaft mode.

    The listener at `sasl` has one user, `limited`, without any right.
    """

    def __init__(self, folder):
        self.folder = folder
        plain, sasl, controller = _free_ports(3)
        self.address, self.sasl = f"127.0.0.1:{plain}", f"127.0.0.1:{sasl}"
        file = folder / "server.properties"
        file.write_text(
            _PROPERTIES.format(plain=plain, sasl=sasl, controller=controller, folder=folder)
        )
        # Nothing is as fast as it could be, and starts in half the time.
        self._java = ["java", "-Xmx256m", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC"]
        self._java += ["-Xshare:auto", "-cp", f"{_JARS}/*"]
        number = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        # It may begin with a dash.
        named = f"--cluster-id={number}"
        tool = [*self._java, "kafka.tools.StorageTool", "format", named, "-c", file]
        done = subprocess.run(tool, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stdout + done.stderr
        self._log = (folder / "broker.log").open("wb")
        run = [*self._java, "kafka.Kafka", file]
        self._process = subprocess.Popen(run, stdout=self._log, stderr=self._log)
        self._wait(plain)

    def _wait(self, port):
        until = time.monotonic() + 60
        while True:
            assert self._process.poll() is None, (self.folder / "broker.log").read_text()
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
            except OSError:
                assert time.monotonic() < until, "the broker does not listen"
                time.sleep(0.05)
            else:
                return

    def url(self, topic, **options):
        """Gives the URL of a topic."""
        more = "".join(f"&{name}={value}" for name, value in options.items())
        return f"kafka://{self.address}?topic={topic}{more}"

    def topics(self):
        """Gives the names of all topics."""
        return set(AdminClient({"bootstrap.servers": self.address}).list_topics(timeout=10).topics)

    def remove(self, topic):
        """Removes a topic."""
        admin = AdminClient({"bootstrap.servers": self.address})
        admin.delete_topics([topic])[topic].result(10)

    def records(self, topic, isolation="read_committed"):
        """Gives the records of a topic that a consumer sees, by partition."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.address,
                "group.id": "tests",
                "isolation.level": isolation,
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
            }
        )
        try:
            found = consumer.list_topics(topic, timeout=10).topics[topic]
            if found.error is not None:
                return []
            places = [TopicPartition(topic, each, 0) for each in found.partitions]
            consumer.assign(places)
            left = self._ends(places, isolation)
            records = []
            until = time.monotonic() + 30
            while left:
                assert time.monotonic() < until, f"{topic} has no end"
                for record in consumer.consume(1000, timeout=0.1):
                    if record.error() is None:
                        records.append(record)
                    elif record.offset() >= left.get(record.partition(), 0):
                        left.pop(record.partition(), None)
            return sorted(records, key=lambda each: (each.partition(), each.offset()))
        finally:
            consumer.close()

    def _ends(self, places, isolation):
        """Gives the offset after the last record of each partition that a consumer sees."""
        admin = AdminClient({"bootstrap.servers": self.address})
        level = IsolationLevel[isolation.upper()]
        until = time.monotonic() + _SETTLED
        while True:
            try:
                written = _latest(admin, places, IsolationLevel.READ_UNCOMMITTED)
                seen = _latest(admin, places, level)
            except KafkaException:
                assert time.monotonic() < until, "a partition has no leader"
            else:
                # What is between is of a commit that is to be seen, or of a process that died.
                if all(seen[each] >= written[each] for each in seen) or time.monotonic() > until:
                    return seen
            time.sleep(0.05)

    def table(self, topic):
        """Gives the table that a topic comes to: the last record of each key, unless null."""
        found = {}
        for record in self.records(topic):
            assert record.key() is not None, "a compacted topic takes no record without a key"
            if record.value() is None:
                found.pop(record.key(), None)
            else:
                assert record.key() not in found or found[record.key()].partition() == (
                    record.partition()
                ), "a key is in two partitions"
                found[record.key()] = record
        return found

    def close(self):
        self._process.kill()
        self._process.wait()
        self._log.close()


def _latest(admin, places, level):
    """Gives the offset after the last record of each partition, as of an isolation level."""
    found = admin.list_offsets(
        dict.fromkeys(places, OffsetSpec.latest()), isolation_level=level, request_timeout=10
    )
    return {place.partition: each.result().offset for place, each in found.items()}


def headers(record):
    """Gives the headers of a record, numbers as such."""
    found = {name: value.decode() for name, value in record.headers() or ()}
    return {
        name: int(value) if value.lstrip("-").isdigit() else value for name, value in found.items()
    }


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
