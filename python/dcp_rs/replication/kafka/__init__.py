"""Kafka: a topic for a table or a log, and the state in the same transaction."""

from __future__ import annotations

from dcp_rs.replication.kafka.target import KafkaDatabase, KafkaTarget

__all__ = ["KafkaDatabase", "KafkaTarget"]
