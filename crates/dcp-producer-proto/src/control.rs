//! DCP_CONTROL: the settings of a connection (DCP page "control").

use core::time::Duration;

use dcp_wire::Status;
use dcp_wire::message::{Control, OpenFlags};

use super::refusal::Refusal;
use super::settings::{OutOfOrder, Priority, Settings, SyncWrites};
use super::{ConnectionConfig, Features};

/// The keys that a client may abbreviate: servers up to 8.0 compare only as many bytes as were
/// sent.
const ABBREVIABLE: [&str; 8] = [
    Control::CONNECTION_BUFFER_SIZE,
    "stream_buffer_size",
    Control::ENABLE_NOOP,
    Control::FORCE_VALUE_COMPRESSION,
    "supports_hifi_MFU",
    Control::SET_NOOP_INTERVAL,
    Control::SET_PRIORITY,
    Control::ENABLE_EXPIRY_OPCODE,
];

/// The keys servers before collections know.
const LEGACY_KEYS: [&str; 11] = [
    Control::CONNECTION_BUFFER_SIZE,
    "enable_ext_metadata",
    "stream_buffer_size",
    Control::ENABLE_NOOP,
    Control::FORCE_VALUE_COMPRESSION,
    Control::SET_NOOP_INTERVAL,
    Control::SET_PRIORITY,
    "supports_cursor_dropping",
    "supports_cursor_dropping_vulcan",
    "supports_hifi_MFU",
    Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM,
];

impl Settings {
    /// Applies one control; a refused one changes nothing.
    ///
    /// Clients probe for features by EINVAL for unknown keys and values, so unsupported ones
    /// (change streams of a storage without history) are refused as by servers without them.
    pub(super) fn apply(
        &mut self,
        control: &Control<'_>,
        features: Features,
        config: &ConnectionConfig,
        keeps_history: bool,
    ) -> Result<(), Refusal> {
        const INVALID: Refusal = Refusal::Status(Status::EINVAL);
        const UNSUPPORTED: Refusal = Refusal::Status(Status::NOT_SUPPORTED);
        let key = ABBREVIABLE
            .into_iter()
            .map(str::as_bytes)
            .find(|full| full.starts_with(control.key))
            .unwrap_or(control.key);
        let key = str::from_utf8(key).map_err(|_| INVALID)?;
        let came_with_6_5 = key == Control::ENABLE_EXPIRY_OPCODE && self.version.is_at_least(6, 5);
        if self.version.is_legacy() && !LEGACY_KEYS.contains(&key) && !came_with_6_5 {
            return Err(INVALID);
        }
        // Where any value is allowed, it need not be text.
        let value = str::from_utf8(control.value).unwrap_or_default();
        match (key, value) {
            (Control::CONNECTION_BUFFER_SIZE, size) => {
                let size = decimal(size).ok_or(INVALID)?;
                if size > config.max_buffer_size {
                    return Err(Refusal::Status(Status::ENOMEM));
                }
                self.buffer_size = size;
            }
            ("stream_buffer_size", _) => return Err(UNSUPPORTED),
            (Control::ENABLE_NOOP, on) => self.noop_enabled = on == "true",
            (Control::SET_NOOP_INTERVAL, seconds) => {
                let legacy = self.version.is_legacy();
                let interval = match decimal(seconds).filter(|_| legacy) {
                    Some(seconds) => Some(Duration::from_secs(seconds.max(1).into())),
                    None => noop_interval(seconds, config),
                };
                self.noop_interval = interval.ok_or(INVALID)?;
            }
            ("supports_cursor_dropping" | "supports_cursor_dropping_vulcan", on) => {
                self.cursor_dropping = on == "true";
            }
            // Servers before 7.0 accept it without effect: extended metadata was removed in 5.5.
            ("enable_ext_metadata", _) if self.version.is_legacy() => {}
            (Control::SET_PRIORITY, "low") => self.priority = Some(Priority::Low),
            (Control::SET_PRIORITY, "medium") => self.priority = Some(Priority::Medium),
            (Control::SET_PRIORITY, "high") => self.priority = Some(Priority::High),
            (Control::BACKFILL_ORDER, "round-robin") => self.sequential_backfills = false,
            (Control::BACKFILL_ORDER, "sequential") => self.sequential_backfills = true,
            (Control::ENABLE_OUT_OF_ORDER_SNAPSHOTS, "true") => {
                self.out_of_order = OutOfOrder::Allowed;
            }
            (Control::ENABLE_OUT_OF_ORDER_SNAPSHOTS, "true_with_seqno_advanced") => {
                self.out_of_order = OutOfOrder::WithSeqnoAdvanced;
            }
            ("supports_hifi_MFU", on) => self.hifi_mfu = on == "true",
            (Control::FORCE_VALUE_COMPRESSION, on) => {
                if !features.snappy {
                    return Err(Refusal::invalid("force_value_compression needs snappy"));
                }
                self.force_compression = on == "true";
            }
            (Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM, on) => {
                self.stream_end_on_close |= on == "true";
            }
            (Control::ENABLE_EXPIRY_OPCODE, on) => {
                // The layout has a delete time, so it needs the flag; the answer does not depend on
                // it.
                self.expiry_opcode =
                    on == "true" && self.flags.contains(OpenFlags::INCLUDE_DELETE_TIMES);
            }
            ("include_deleted_user_xattrs", "true")
                if self.flags.contains(OpenFlags::INCLUDE_DELETED_USER_XATTRS) => {}
            ("v7_dcp_status_codes", "true") => self.v7_status_codes = true,
            (Control::ENABLE_STREAM_ID, "true") => {
                if self.sync_writes != SyncWrites::Off {
                    return Err(UNSUPPORTED);
                }
                self.stream_ids = true;
            }
            ("enable_sync_writes", "true") => {
                if self.stream_ids {
                    return Err(UNSUPPORTED);
                }
                self.sync_writes = self.sync_writes.max(SyncWrites::Visible);
                self.replicate_if_named();
            }
            ("consumer_name", _) => {
                self.consumer_name = true;
                self.replicate_if_named();
            }
            // Added with 8.0.
            (Control::MAX_MARKER_VERSION, _) if !self.version.is_at_least(8, 0) => {
                return Err(INVALID);
            }
            (Control::MAX_MARKER_VERSION, _) if !features.collections => {
                return Err(UNSUPPORTED);
            }
            (Control::MAX_MARKER_VERSION, "2.2") => self.purge_seqno_markers = true,
            (Control::FLATBUFFERS_SYSTEM_EVENTS, "true") => self.flatbuffers_events = true,
            (Control::CHANGE_STREAMS, "true") if !keeps_history => return Err(UNSUPPORTED),
            (Control::CHANGE_STREAMS, "true") => self.change_streams = true,
            _ => return Err(INVALID),
        }
        Ok(())
    }

    /// A client becomes a replica once it has sent both its name and that it accepts prepares.
    fn replicate_if_named(&mut self) {
        if self.consumer_name && self.sync_writes == SyncWrites::Visible {
            self.sync_writes = SyncWrites::Replication;
        }
    }
}

fn decimal(text: &str) -> Option<u32> {
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    text.parse().ok()
}

fn noop_interval(text: &str, config: &ConnectionConfig) -> Option<Duration> {
    let interval = Duration::try_from_secs_f64(text.parse().ok()?).ok()?;
    (interval >= config.min_noop_interval).then_some(interval)
}
