//! What the consumer's end requests before its first stream.

use std::collections::VecDeque;

use bytes::BytesMut;
use dcp_wire::message::{Control, GetErrorMap};
use dcp_wire::{EncodeError, Opaque};

use super::config::Config;

/// One request of the set-up.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    /// Finds out whether the producer knows GET_ERROR_MAP.
    ErrorMap,
    Control(&'static str, String),
}

/// The requests of the set-up, in the order in which nodes send them.
#[derive(Debug)]
pub(super) struct Negotiation {
    rest: VecDeque<Step>,
    /// Whether each request waits for the answer to the previous one. Servers before 7.0 wait only
    /// for the answer to GET_ERROR_MAP.
    is_patient: bool,
    /// The request whose answer is awaited.
    awaited: Option<Opaque>,
    /// The request for a flow-control window.
    window: Option<Opaque>,
}

/// What an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answered {
    /// The negotiation continues.
    Other,
    /// The producer refused flow control.
    NoWindow,
}

impl Negotiation {
    pub(super) fn new(config: &Config, collections: bool) -> Self {
        let on = |key| Step::Control(key, "true".to_owned());
        let version = config.server_version;
        let is_patient = !version.is_legacy();
        let window = Step::Control(Control::CONNECTION_BUFFER_SIZE, config.buffer_size.to_string());
        let interval = if is_patient {
            format!("{:.6}", config.noop_interval.as_secs_f64())
        } else {
            config.noop_interval.as_secs().max(1).to_string()
        };
        let begin = [
            on(Control::ENABLE_NOOP),
            Step::Control(Control::SET_NOOP_INTERVAL, interval),
            Step::Control("set_priority", "high".to_owned()),
        ];
        let mut rest = VecDeque::new();
        if !is_patient {
            rest.extend([window.clone(), Step::ErrorMap]);
            rest.extend(begin);
            rest.extend([
                on("enable_ext_metadata"),
                on("supports_cursor_dropping_vulcan"),
                on("supports_hifi_MFU"),
                on(Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM),
            ]);
            return Self { rest, is_patient, awaited: None, window: None };
        }
        rest.push_back(Step::ErrorMap);
        rest.extend(begin);
        rest.extend([
            on("supports_cursor_dropping_vulcan"),
            on("supports_hifi_MFU"),
            on(Control::SEND_STREAM_END_ON_CLIENT_CLOSE_STREAM),
            on(Control::ENABLE_EXPIRY_OPCODE),
        ]);
        if let Some(name) = &config.consumer_name {
            rest.extend([on("enable_sync_writes"), Step::Control("consumer_name", name.clone())]);
        }
        rest.extend([on("include_deleted_user_xattrs"), on("v7_dcp_status_codes")]);
        if version.is_at_least(7, 2) {
            rest.extend([on(Control::FLATBUFFERS_SYSTEM_EVENTS), on(Control::CHANGE_STREAMS)]);
        }
        if version.is_at_least(8, 0) && collections {
            rest.push_back(Step::Control(Control::MAX_MARKER_VERSION, "2.2".to_owned()));
        }
        rest.push_back(window);
        Self { rest, is_patient, awaited: None, window: None }
    }

    /// Whether stream requests may follow.
    pub(super) fn is_done(&self) -> bool {
        self.rest.is_empty() && self.awaited.is_none()
    }

    /// Appends the requests that may be sent now, with opaques from `next_opaque`.
    pub(super) fn write(
        &mut self,
        mut next_opaque: impl FnMut() -> Opaque,
        out: &mut BytesMut,
    ) -> Result<(), EncodeError> {
        while self.awaited.is_none()
            && let Some(step) = self.rest.pop_front()
        {
            let opaque = next_opaque();
            match &step {
                Step::ErrorMap => GetErrorMap { version: 0 }.encode(opaque, out)?,
                Step::Control(key, value) => {
                    Control { key: key.as_bytes(), value: value.as_bytes() }.encode(opaque, out)?;
                    if *key == Control::CONNECTION_BUFFER_SIZE {
                        self.window = Some(opaque);
                    }
                }
            }
            if self.is_patient || step == Step::ErrorMap {
                self.awaited = Some(opaque);
            }
        }
        Ok(())
    }

    /// Handles the answer to a request. A refused feature is simply not used.
    pub(super) fn answered(&mut self, opaque: Opaque, is_success: bool) -> Answered {
        if self.awaited == Some(opaque) {
            self.awaited = None;
        }
        if self.window == Some(opaque) && !is_success {
            return Answered::NoWindow;
        }
        Answered::Other
    }
}
