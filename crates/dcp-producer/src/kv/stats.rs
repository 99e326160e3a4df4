//! STAT: statistics for people and tests.

use dcp_producer_proto::VBucketState;
use dcp_wire::{Status, Vbid};

use super::command::Command;
use super::failure::Failure;
use crate::bucket::{Bucket, VBucketGuard};

type Figures = Vec<(String, String)>;

impl Command<'_, '_> {
    /// Answers a series of names and values, ended by an empty one.
    pub(super) fn stats(&mut self) -> Result<(), Failure> {
        if !self.frame.extras.is_empty() || !self.frame.value.is_empty() {
            return Err(Failure::Invalid("the request has a key at most"));
        }
        let bucket = &self.served()?.bucket;
        let group = String::from_utf8_lossy(self.frame.key).into_owned();
        let mut words = group.split_ascii_whitespace();
        let name = words.next().unwrap_or_default();
        let vbid = match words.next().map(str::parse) {
            None => None,
            Some(Ok(vbid)) => Some(Vbid(vbid)),
            Some(Err(_)) => return Err(Failure::Invalid("the vBucket is a number")),
        };
        let figures = match name {
            "" => bucket_figures(bucket),
            "vbucket" => self.each_vbucket(vbid, |vbucket, out| {
                out.push((format!("vb_{}", vbucket.vbid().0), state(vbucket).to_owned()));
            })?,
            "vbucket-seqno" => self.each_vbucket(vbid, seqno_figures)?,
            "vbucket-details" => self.each_vbucket(vbid, detail_figures)?,
            "failovers" => self.each_vbucket(vbid, failover_figures)?,
            _ => return Err(Status::KEY_ENOENT.into()),
        };
        for (name, value) in figures {
            let response = self.success().with_key(name.as_bytes()).with_value(value.as_bytes());
            self.succeed(response)?;
        }
        self.succeed(self.success())
    }

    /// Statistics of one vBucket, or of all on this node.
    fn each_vbucket(
        &self,
        only: Option<Vbid>,
        figures: impl Fn(&VBucketGuard<'_>, &mut Figures),
    ) -> Result<Figures, Failure> {
        let (bucket, node) = (&self.served()?.bucket, self.session.node);
        let mut out = Figures::new();
        if let Some(vbid) = only {
            figures(&bucket.lock_on(node, vbid).ok_or(Failure::NotMyVbucket)?, &mut out);
            return Ok(out);
        }
        for vbid in bucket.vbids() {
            if let Some(vbucket) = bucket.lock_on(node, vbid) {
                figures(&vbucket, &mut out);
            }
        }
        Ok(out)
    }
}

fn bucket_figures(bucket: &Bucket) -> Figures {
    let vbuckets = || bucket.vbids().filter_map(|vbid| bucket.lock(vbid));
    let documents: u64 = vbuckets().map(|vbucket| vbucket.live_counts().documents).sum();
    let history: usize = vbuckets().map(|vbucket| vbucket.history_bytes()).sum();
    [
        ("curr_items", documents.to_string()),
        ("ep_max_size", bucket.memory().quota().to_string()),
        ("mem_used", bucket.memory().used().to_string()),
        ("rollback_history_bytes", history.to_string()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .to_vec()
}

fn state(vbucket: &VBucketGuard<'_>) -> &'static str {
    match vbucket.state {
        VBucketState::Active => "active",
        VBucketState::Replica => "replica",
        VBucketState::Pending => "pending",
        VBucketState::Dead => "dead",
    }
}

fn seqno_figures(vbucket: &VBucketGuard<'_>, out: &mut Figures) {
    let vbid = vbucket.vbid().0;
    for (name, value) in [
        ("abs_high_seqno", vbucket.high_seqno.0),
        ("high_seqno", vbucket.high_seqno.0),
        ("last_persisted_seqno", vbucket.told_persisted_seqno().0),
        ("purge_seqno", vbucket.purge_seqno.0),
        ("uuid", vbucket.vbuuid().0),
    ] {
        out.push((format!("vb_{vbid}:{name}"), value.to_string()));
    }
}

fn detail_figures(vbucket: &VBucketGuard<'_>, out: &mut Figures) {
    let vbid = vbucket.vbid().0;
    out.push((format!("vb_{vbid}"), state(vbucket).to_owned()));
    out.push((format!("vb_{vbid}:num_items"), vbucket.live_counts().documents.to_string()));
    seqno_figures(vbucket, out);
}

fn failover_figures(vbucket: &VBucketGuard<'_>, out: &mut Figures) {
    let vbid = vbucket.vbid().0;
    let entries = vbucket.failover.entries();
    out.push((format!("vb_{vbid}:num_entries"), entries.len().to_string()));
    for (index, entry) in entries.iter().enumerate() {
        out.push((format!("vb_{vbid}:{index}:id"), entry.vbuuid.0.to_string()));
        out.push((format!("vb_{vbid}:{index}:seq"), entry.seqno.0.to_string()));
    }
}
