//! How the DCP connections of a stream are opened.

use std::time::Duration;

use dcp_proto::consumer::{ControlSetting, DcpOpen};
use dcp_wire::Feature;
use dcp_wire::message::{Control, OpenFlags};
use rand::Rng;
use rand::rngs::StdRng;

use crate::{Content, Error, ErrorKind, StreamOptions};

/// How the DCP connections of a stream are opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Opening {
    flags: OpenFlags,
    /// Flow-control window in bytes.
    pub(crate) buffer_size: u32,
    noop_interval_secs: u32,
    /// Whether compressed documents are requested.
    compressed: bool,
    /// Whether every version is requested.
    history: bool,
    /// Whether initial loads may be out of order.
    out_of_order: bool,
}

impl Opening {
    pub(crate) fn new(options: &StreamOptions) -> Result<Self, Error> {
        let Content { values, xattrs } = options.content;
        let mut flags = OpenFlags::INCLUDE_DELETE_TIMES;
        flags.set(OpenFlags::INCLUDE_XATTRS | OpenFlags::INCLUDE_DELETED_USER_XATTRS, xattrs);
        // The other flag without values turns tombstones of a backfill into mutations on servers
        // 7.6 and 8.0.
        flags.set(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE, !values);
        let secs = u32::try_from(options.noop_interval.as_secs()).unwrap_or(u32::MAX);
        if secs == 0 {
            let message = "the noop interval must be at least one second";
            return Err(Error::new(ErrorKind::Config, message));
        }
        if options.buffer_size < StreamOptions::MIN_BUFFER_SIZE {
            let least = StreamOptions::MIN_BUFFER_SIZE;
            let message = format!("the buffer size must be at least {least} bytes");
            return Err(Error::new(ErrorKind::Config, message));
        }
        let StreamOptions { buffer_size, compressed, history, out_of_order, .. } = *options;
        let noop_interval_secs = secs;
        Ok(Self { flags, buffer_size, noop_interval_secs, compressed, history, out_of_order })
    }

    /// Interval of the server's noops.
    pub(crate) fn noop_interval(&self) -> Duration {
        Duration::from_secs(self.noop_interval_secs.into())
    }

    /// The request, with a unique name.
    pub(crate) fn request(&self, mut randomness: StdRng) -> DcpOpen {
        // The server ends an older connection of the same name, so names are unique.
        let name = format!("dcp_rs/{:032x}", randomness.random::<u128>());
        let mut open = DcpOpen::new(name, self.flags, self.buffer_size, self.noop_interval_secs);
        if self.compressed {
            let setting = ControlSetting::optional(Control::FORCE_VALUE_COMPRESSION, true);
            open = open.with(setting.needing(Feature::SNAPPY));
        }
        if self.history {
            open = open.with(ControlSetting::required(Control::CHANGE_STREAMS, true));
        }
        if self.out_of_order {
            let key = Control::ENABLE_OUT_OF_ORDER_SNAPSHOTS;
            // Servers before 7.1 send in seqno order.
            open = open.with(ControlSetting::optional(key, "true_with_seqno_advanced"));
        }
        open
    }
}
