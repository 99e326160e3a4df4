//! Rollback mitigation of a stream: observes persisted seqnos and passes them to connections.

use std::sync::Arc;
use std::time::Instant;

use dcp_proto::BatchSink;
use dcp_proto::topology::{Address, BucketConfig};
use dcp_wire::{Vbid, Vbuuid};
use tokio::sync::mpsc;

use super::{Cluster, Event, Slot};
use crate::connect::ConnectionId;
use crate::connection::now;
use crate::driver::Command;
use crate::error::Seconds;
use crate::persistence::observer::{self, Observed};
use crate::persistence::{PersistedTo, Question};
use crate::{Chain, Error, StreamEvent};

impl<S: BatchSink> Cluster<S> {
    /// The stream of a vBucket is open, and its changes wait until they are persisted.
    pub(super) fn watch(&mut self, on: ConnectionId, vbid: Vbid, vbuuid: Vbuuid, now: Instant) {
        let copies = self.bucket.copies_of(&self.bucket.config(), vbid);
        self.persistence.watch(vbid, (on, vbuuid), copies, now);
    }

    /// A vBucket on a connection has unpersisted changes, or none any more.
    pub(super) fn unpersisted(
        &mut self,
        on: ConnectionId,
        vbid: Vbid,
        vbuuid: Option<Vbuuid>,
        now: Instant,
    ) {
        match vbuuid {
            Some(vbuuid) => {
                let copies = self.bucket.copies_of(&self.bucket.config(), vbid);
                self.persistence.unpersisted(vbid, (on, vbuuid), copies, now);
            }
            None => self.persistence.all_persisted(vbid, on),
        }
    }

    /// The cluster map has changed.
    pub(super) fn follow_copies(&mut self, map: &BucketConfig, now: Instant) {
        let bucket = &self.bucket;
        let advanced = self.persistence.follow(|vbid| bucket.copies_of(map, vbid), now);
        self.pass_on(advanced);
        let persistence = &self.persistence;
        self.observers.retain(|address, _| persistence.needs(address));
    }

    /// Sends requests to the nodes that are due.
    pub(super) fn observe(&mut self, now: Instant) {
        for (address, question) in self.persistence.due(now) {
            let Err(refused) = self.observer(&address).send(question) else { continue };
            // The runtime has ended its task; a new one takes over.
            self.observers.remove(&address);
            let _ = self.observer(&address).send(refused.0);
        }
        for (vbid, on) in self.persistence.left_behind(now) {
            tracing::debug!(%vbid, "the active copy has left the branch of unpersisted changes");
            self.close(vbid, on);
        }
        for (vbid, waits) in self.persistence.overdue(now) {
            self.stats.events.push(StreamEvent::Unpersisted { vbid, waits });
            let waits = Seconds(waits);
            tracing::warn!(%vbid, %waits, "changes stay unpersisted: a copy does not have them on disk");
        }
    }

    /// The task that observes a node's copies.
    fn observer(&mut self, address: &Address) -> &mpsc::UnboundedSender<Question> {
        let (bucket, cancel) = (&self.bucket, &self.cancel);
        let (outcomes, tasks) = (&self.outcomes.sender, &mut self.tasks);
        self.observers.entry(address.clone()).or_insert_with(|| {
            let (sender, questions) = mpsc::unbounded_channel();
            let (outcomes, node) = (outcomes.clone(), address.clone());
            let report = move |observed| {
                // There is no receiver only if the stream has ended.
                let _ = outcomes.send(Event::Observed(node.clone(), observed));
            };
            let observe = observer::observe(Arc::clone(bucket), address.clone(), questions, report);
            let cancel = cancel.clone();
            tasks.spawn(async move {
                let _ = cancel.run_until_cancelled(observe).await;
            });
            sender
        })
    }

    /// Handles a node's persisted seqnos, or its failure to report them.
    pub(super) fn observed(&mut self, address: &Address, observed: Observed) -> Result<(), Error> {
        let now = now();
        let advanced = match observed {
            Observed::Answers { answers, is_map_old } => {
                (self.has_observed, self.refused_since) = (true, None);
                if is_map_old {
                    self.poll_map(now);
                }
                self.persistence.answered(address, Some(&answers), now)
            }
            Observed::Lost(error) => {
                let error = Chain(&error);
                tracing::debug!(%address, %error, "a node did not report its persisted seqnos");
                self.poll_map(now);
                self.persistence.answered(address, None, now)
            }
            // As with streams: a node that has answered before may answer again.
            Observed::Refused(error) => {
                let since = *self.refused_since.get_or_insert(now);
                let refused = now.saturating_duration_since(since);
                if !self.has_observed || refused >= self.reconciler.patience() {
                    return Err(error);
                }
                let error = Chain(&error);
                tracing::warn!(%address, %error, "a node refuses to report its persisted seqnos");
                self.persistence.answered(address, None, now)
            }
        };
        self.pass_on(advanced);
        Ok(())
    }

    /// Passes persisted seqnos to connections, to each in one message.
    fn pass_on(&self, mut advanced: Vec<PersistedTo>) {
        for node in self.nodes.values() {
            let Slot::Up { id, commands, .. } = &node.slot else { continue };
            let (here, elsewhere) = advanced.into_iter().partition(|persisted| persisted.on == *id);
            advanced = elsewhere;
            let here: Vec<PersistedTo> = here;
            if !here.is_empty() {
                // A connection that has ended reports that itself.
                let _ = commands.send(Command::Persisted(here));
            }
        }
    }
}
