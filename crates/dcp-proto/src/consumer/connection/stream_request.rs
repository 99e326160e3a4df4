//! Stream requests: where to resume, and what to filter.

use core::fmt::Write as _;

use bytes::BytesMut;
use dcp_wire::message::{StreamRequest, StreamRequestFlags};
use dcp_wire::{CollectionId, ScopeId, Seqno};

use super::ConnectionConfig;
use crate::consumer::stream::Stream;

/// What a stream requests (public DCP page "stream-request", JSON value).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StreamFilter {
    /// The whole bucket.
    #[default]
    All,
    /// One scope, including collections created later.
    Scope(ScopeId),
    /// Some collections.
    Collections(Vec<CollectionId>),
}

impl StreamFilter {
    /// The member for this filter in the value of a stream request, and its JSON; `None` for the
    /// whole bucket.
    #[must_use]
    pub fn member(&self) -> Option<(&'static str, String)> {
        match self {
            Self::All => None,
            Self::Scope(scope) => Some(("scope", format!("\"{scope}\""))),
            Self::Collections(ids) => {
                let ids: Vec<_> = ids.iter().map(|id| format!("\"{id}\"")).collect();
                Some(("collections", format!("[{}]", ids.join(","))))
            }
        }
    }
}

/// What all stream requests of a connection have in common.
pub(super) struct RequestContext<'a> {
    config: &'a ConnectionConfig,
}

impl<'a> RequestContext<'a> {
    pub(super) const fn new(config: &'a ConnectionConfig) -> Self {
        Self { config }
    }

    /// Appends the request for `stream` to `out`.
    pub(super) fn encode(&self, stream: &Stream, out: &mut BytesMut) {
        let position = &stream.position;
        let snapshot = position.request_snapshot();
        let value = self.value(stream);
        // A replica's history may be shorter than what was read from the active vBucket.
        let mut flags = StreamRequestFlags::ACTIVE_VB_ONLY;
        flags.set(
            StreamRequestFlags::IGNORE_PURGED_TOMBSTONES,
            self.config.ignore_purged_tombstones,
        );
        let encoded = StreamRequest {
            vbid: stream.vbid,
            opaque: stream.opaque,
            flags,
            start_seqno: position.seqno,
            end_seqno: stream.requested_end(),
            vbuuid: position.vbuuid(),
            snapshot_start: snapshot.start,
            snapshot_end: snapshot.end,
            value: value.as_bytes(),
        }
        .encode(out);
        debug_assert!(encoded.is_ok(), "a filter fits a packet");
    }

    /// The JSON value; empty without members, since servers refuse an object without known members.
    fn value(&self, stream: &Stream) -> String {
        if !self.config.collections {
            return String::new();
        }
        let position = &stream.position;
        let mut members = String::new();
        let mut member = |name: &str, value: &str| {
            let separator = if members.is_empty() { "" } else { "," };
            // Writing to a string cannot fail.
            let _ = write!(members, "{separator}\"{name}\":{value}");
        };
        if let Some((name, value)) = self.config.filter.member() {
            member(name, &value);
        }
        if self.config.filter != StreamFilter::All && position.manifest_uid.0 != 0 {
            // Servers before 7.0 refuse a vBucket that has not reached this manifest yet.
            member("uid", &format!("\"{}\"", position.manifest_uid));
        }
        if self.config.purge_seqno
            && position.seqno != Seqno::ZERO
            && position.purge_seqno != Seqno::ZERO
        {
            member("purge_seqno", &format!("\"{}\"", position.purge_seqno));
        }
        if members.is_empty() { members } else { format!("{{{members}}}") }
    }
}
