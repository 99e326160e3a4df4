"""Micro-batches as the Scala connector's source `couchbase.kv` plans and runs them (3.5, 4.x).

Its algorithm, reproduced in a plain reader so that it meets the same faults:

* an offset is a seqno per vBucket, to which a snapshot of that one seqno is assumed;
* the branch in the stream request is the newest that the server has when the batch is read, so that
  the server never asks for a rollback;
* a batch is complete when as many streams have ended as were opened, for whatever reason;
* the end that was planned is the next batch's start.
"""

import itertools
import socket
import struct
from types import SimpleNamespace

import dcp_rs

HEADER = struct.Struct(">BBHBBHIIQ")
HELLO, SASL_AUTH, SELECT_BUCKET = 0x1F, 0x21, 0x89
DCP_OPEN, DCP_CONTROL, FAILOVER_LOG, STREAM_REQ, STREAM_END = 0x50, 0x5E, 0x54, 0x53, 0x55
MUTATION, DELETION, EXPIRATION = 0x57, 0x58, 0x59
FEATURES = (0x0B, 0x12, 0x06)


def packet(opcode, key=b"", extras=b"", value=b"", vbucket=0):
    length = len(extras) + len(key) + len(value)
    head = HEADER.pack(0x80, opcode, len(key), len(extras), 0, vbucket, length, vbucket, 0)
    return head + extras + key + value


class Node:
    """A connection to a node, with DCP opened."""

    names = itertools.count()

    def __init__(self, address, options):
        host, _, port = address.rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=60)
        self.input = self.socket.makefile("rb")
        features = b"".join(struct.pack(">H", code) for code in FEATURES)
        secret = f"\0{options['username']}\0{options['password']}".encode()
        self.call(packet(HELLO, b"couchbase.kv", value=features))
        self.call(packet(SASL_AUTH, b"PLAIN", value=secret))
        self.call(packet(SELECT_BUCKET, options["bucket"].encode()))
        name = f"couchbase.kv-{next(self.names)}".encode()
        self.call(packet(DCP_OPEN, name, extras=struct.pack(">II", 0, 1)))
        self.call(packet(DCP_CONTROL, b"enable_noop", value=b"true"))

    def receive(self):
        magic, opcode, key, extras, _, status, length, opaque, _ = HEADER.unpack(
            self.input.read(HEADER.size)
        )
        body = self.input.read(length)
        return SimpleNamespace(
            is_answer=magic == 0x81,
            opcode=opcode,
            status=status,
            opaque=opaque,
            extras=body[:extras],
            key=body[extras : extras + key],
            value=body[extras + key :],
        )

    def call(self, request):
        self.socket.sendall(request)
        answer = self.receive()
        assert answer.status == 0, (hex(answer.opcode), hex(answer.status))
        return answer.value

    def newest_branch(self, vbucket):
        return struct.unpack_from(">Q", self.call(packet(FAILOVER_LOG, vbucket=vbucket)))[0]

    def open_stream(self, vbucket, branch, start, end):
        extras = struct.pack(">IIQQQQQ", 0, 0, start, end, branch if start else 0, start, start)
        self.socket.sendall(packet(STREAM_REQ, extras=extras, vbucket=vbucket))

    def close(self):
        self.input.close()
        self.socket.close()


class SeqnoJob:
    """A query.

    Attributes:
        documents: What a sink that keeps the latest row of each key holds.
    """

    def __init__(self, options):
        self.options = options
        self.start, self.documents = {}, {}

    def client(self):
        return dcp_rs.connect(
            self.options["connectionString"],
            username=self.options["username"],
            password=self.options["password"],
            bucket=self.options["bucket"],
        )

    def note(self):
        """Plans the end of a batch."""
        with self.client() as client:
            self.noted = client.high_seqnos()

    def batch(self, during=lambda: None):
        """Reads one batch; `during` is called with all streams open, once a change has come."""
        if not hasattr(self, "noted"):
            self.note()
        with self.client() as client:
            by_node = client.vbuckets_by_node()
        for address, vbuckets in by_node.items():
            due = [each for each in vbuckets if self.noted[each] > self.start.get(each, 0)]
            during = self.read(address, due, during)
        self.start = self.noted
        del self.noted

    def read(self, address, vbuckets, during):
        node = Node(address, self.options)
        branches = {vbucket: node.newest_branch(vbucket) for vbucket in vbuckets}
        for vbucket, branch in branches.items():
            node.open_stream(vbucket, branch, self.start.get(vbucket, 0), self.noted[vbucket])
        opened = ended = 0
        while ended < len(vbuckets):
            message = node.receive()
            if message.opcode == STREAM_REQ:
                assert message.status == 0, hex(message.status)
                opened += 1
            elif message.opcode == STREAM_END:
                ended += 1
            elif message.opcode in (MUTATION, DELETION, EXPIRATION):
                # The default collection's id is one byte.
                key = message.key[1:].decode()
                self.documents[key] = message.value if message.opcode == MUTATION else None
                if opened == len(vbuckets):
                    during()
                    during = lambda: None  # noqa: E731
        node.close()
        return during

    def live(self):
        return {key: value for key, value in self.documents.items() if value is not None}
