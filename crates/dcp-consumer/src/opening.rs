//! How the DCP connections of a stream are opened.

use std::time::Duration;

use dcp_proto::consumer::{BootstrapOutcome, ControlSetting, DcpOpen};
use dcp_proto::topology::Address;
use dcp_wire::Feature;
use dcp_wire::message::{Control, OpenFlags};

use crate::failure_log::LOG;
use crate::{BackfillOrder, Content, Error, InitialDeletions, Priority, StreamOptions};

/// How the DCP connections of a stream are opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Opening {
    flags: OpenFlags,
    /// Flow-control buffer in bytes.
    pub(crate) buffer_size: u32,
    noop_interval_secs: u32,
    /// Whether compressed documents are requested.
    compressed: bool,
    /// Whether every version is requested.
    history: bool,
    /// Whether initial loads may be out of order.
    out_of_order: bool,
    initial_deletions: InitialDeletions,
    priority: Option<Priority>,
    backfill_order: Option<BackfillOrder>,
}

impl Opening {
    pub(crate) fn new(options: &StreamOptions) -> Result<Self, Error> {
        let Content { values, xattrs } = options.content;
        let mut flags = OpenFlags::INCLUDE_DELETE_TIMES;
        flags.set(OpenFlags::INCLUDE_XATTRS | OpenFlags::INCLUDE_DELETED_USER_XATTRS, xattrs);
        // The other flag without values turns tombstones of a backfill into mutations on servers
        // 7.6 and 8.0.
        flags.set(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE, !values);
        let skips = options.initial_deletions != InitialDeletions::Deliver;
        flags.set(OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL, skips);
        let secs = u32::try_from(options.noop_interval.as_secs()).unwrap_or(u32::MAX);
        if secs == 0 {
            return Err(Error::option(&["noop_interval"], "must be at least one second"));
        }
        if options.buffer_size < StreamOptions::MIN_BUFFER_SIZE {
            let least = StreamOptions::MIN_BUFFER_SIZE;
            let problem = format!("must be at least {least} bytes");
            return Err(Error::option(&["buffer_size"], problem));
        }
        Ok(Self {
            flags,
            buffer_size: options.buffer_size,
            noop_interval_secs: secs,
            compressed: options.compressed,
            history: options.history,
            out_of_order: options.out_of_order,
            initial_deletions: options.initial_deletions,
            priority: options.priority,
            backfill_order: options.backfill_order,
        })
    }

    /// Interval of the server's noops.
    pub(crate) fn noop_interval(&self) -> Duration {
        Duration::from_secs(self.noop_interval_secs.into())
    }

    /// Settings that change nothing but how fast the changes come: a server may refuse them.
    fn wishes(&self) -> impl Iterator<Item = ControlSetting> {
        let priority = self.priority.map(|it| (Control::SET_PRIORITY, it.name()));
        let order = self.backfill_order.map(|it| (Control::BACKFILL_ORDER, it.name()));
        let wishes = [priority, order].into_iter().flatten();
        wishes.map(|(key, value)| ControlSetting::optional(key, value))
    }

    /// Logs what the application asked for and a node does not do.
    pub(crate) fn log_refused(&self, address: &Address, outcome: &BootstrapOutcome) {
        for ControlSetting { key, value, .. } in self.wishes() {
            if !outcome.has_control(key) {
                tracing::warn!(
                    name: "setting_unknown",
                    target: LOG, node = %address, key, value,
                    "a node does not have a setting, and is read without it"
                );
            }
        }
    }

    /// The request for a connection of this name.
    pub(crate) fn request(&self, name: String) -> DcpOpen {
        let mut open = DcpOpen::new(name, self.flags, self.buffer_size, self.noop_interval_secs);
        if self.compressed {
            let setting = ControlSetting::optional(Control::FORCE_VALUE_COMPRESSION, true);
            open = open.with(setting.needing(Feature::SNAPPY));
        }
        for setting in self.wishes() {
            open = open.with(setting);
        }
        if self.history {
            open = open.with(ControlSetting::required(Control::CHANGE_STREAMS, true));
        }
        if self.out_of_order {
            let key = Control::ENABLE_OUT_OF_ORDER_SNAPSHOTS;
            // Servers before 7.1 send in seqno order.
            open = open.with(ControlSetting::optional(key, "true_with_seqno_advanced"));
        }
        if self.initial_deletions == InitialDeletions::Skip {
            // Without collections nothing tells the client the seqnos of what is left out.
            open.required_features =
                vec![Feature::DCP_SKIP_DELETES_IN_INITIAL_BACKFILL, Feature::COLLECTIONS];
        }
        open
    }
}

#[cfg(test)]
mod tests {
    use dcp_proto::consumer::{Capability, Negotiated};

    use super::*;

    /// Every way in which content can be asked for, and how the connection is opened for it.
    fn opened() -> Vec<(Content, DcpOpen)> {
        let both = [false, true];
        let contents =
            both.iter().flat_map(|&values| both.map(|xattrs| Content { values, xattrs }));
        let open = |content| {
            let options = StreamOptions { content, ..StreamOptions::default() };
            let opening = Opening::new(&options).expect("options that hold");
            (content, opening.request("name".to_owned()))
        };
        contents.map(open).collect()
    }

    #[test]
    fn op_07_and_op_08_flags_that_servers_refuse_are_not_combined() {
        for (Content { values, xattrs }, open) in opened() {
            let has = |flag| open.flags.contains(flag);
            assert!(!has(OpenFlags::NO_VALUE));
            assert_eq!(has(OpenFlags::NO_VALUE_WITH_UNDERLYING_DATATYPE), !values);
            assert_eq!(has(OpenFlags::INCLUDE_XATTRS), xattrs);
            assert_eq!(has(OpenFlags::INCLUDE_DELETED_USER_XATTRS), xattrs);
        }
    }

    #[test]
    fn flags_and_settings_that_are_asked_for_have_a_row_in_the_table_of_releases() {
        let mut asked = vec![Negotiated::OpenFlag(OpenFlags::PRODUCER)];
        for all in [false, true] {
            let options = StreamOptions {
                content: Content { values: !all, xattrs: all },
                compressed: all,
                history: all,
                out_of_order: all,
                priority: all.then_some(Priority::High),
                backfill_order: all.then_some(BackfillOrder::Sequential),
                initial_deletions: if all {
                    InitialDeletions::SkipIfSupported
                } else {
                    InitialDeletions::Deliver
                },
                ..StreamOptions::default()
            };
            let opening = Opening::new(&options).expect("options that hold");
            let open = opening.request("name".to_owned());
            asked.extend(open.flags.iter().map(Negotiated::OpenFlag));
            asked.extend(open.controls.iter().map(|setting| Negotiated::Control(setting.key)));
        }
        let rows = || Capability::ALL.iter().map(|row| row.by);
        for by in &asked {
            assert!(rows().any(|row| row == *by), "{by} has no row");
        }
        for by in rows() {
            let is_asked = matches!(by, Negotiated::OpenFlag(_) | Negotiated::Control(_));
            assert!(!is_asked || asked.contains(&by), "{by} is not asked for");
        }
    }

    #[test]
    fn op_10_deletions_of_first_loads_are_skipped_on_demand() {
        let opened = |initial_deletions| {
            let options = StreamOptions { initial_deletions, ..StreamOptions::default() };
            let opening = Opening::new(&options).expect("options that hold");
            let open = opening.request("name".to_owned());
            let skips = open.flags.contains(OpenFlags::SKIP_DELETES_IN_INITIAL_BACKFILL);
            (skips, !open.required_features.is_empty())
        };
        assert_eq!(opened(InitialDeletions::Deliver), (false, false));
        assert_eq!(opened(InitialDeletions::Skip), (true, true));
        assert_eq!(opened(InitialDeletions::SkipIfSupported), (true, false));
    }

    #[test]
    fn ct_14_expirations_are_asked_for_with_what_they_need() {
        for (_, open) in opened() {
            let is_expiry =
                |setting: &&ControlSetting| setting.key == Control::ENABLE_EXPIRY_OPCODE;
            let setting = open.controls.iter().find(is_expiry).expect("the control");
            assert_eq!(setting.value, "true");
            assert!(open.flags.contains(OpenFlags::INCLUDE_DELETE_TIMES));
        }
    }

    #[test]
    fn ct_09_and_ct_21_priority_and_order_of_backfills_are_asked_for_on_demand() {
        let asked = |options: StreamOptions| {
            let opening = Opening::new(&options).expect("options that hold");
            let controls = opening.request("name".to_owned()).controls.into_iter();
            controls
                .filter(|it| [Control::SET_PRIORITY, Control::BACKFILL_ORDER].contains(&it.key))
                .map(|it| (it.key, it.value, it.required))
                .collect::<Vec<_>>()
        };
        assert_eq!(asked(StreamOptions::default()), [], "unless they are given");
        for (priority, name) in Priority::ALL.into_iter().zip(["low", "medium", "high"]) {
            let options = StreamOptions { priority: Some(priority), ..StreamOptions::default() };
            assert_eq!(asked(options), [(Control::SET_PRIORITY, name.to_owned(), false)]);
        }
        for (order, name) in BackfillOrder::ALL.into_iter().zip(["round-robin", "sequential"]) {
            let options = StreamOptions { backfill_order: Some(order), ..StreamOptions::default() };
            assert_eq!(asked(options), [(Control::BACKFILL_ORDER, name.to_owned(), false)]);
        }
    }

    #[test]
    fn ct_23_and_ct_25_further_ways_of_reading_are_asked_for_on_demand() {
        let value_of = |options: &StreamOptions, key| {
            let open = Opening::new(options).expect("options that hold");
            let open = open.request("name".to_owned());
            let setting = open.controls.into_iter().find(|setting| setting.key == key);
            setting.map(|setting| (setting.value, setting.required))
        };
        for asked in [false, true] {
            let options =
                StreamOptions { history: asked, out_of_order: asked, ..StreamOptions::default() };
            let wanted = asked.then(|| ("true_with_seqno_advanced".to_owned(), false));
            assert_eq!(value_of(&options, Control::ENABLE_OUT_OF_ORDER_SNAPSHOTS), wanted);
            let wanted = asked.then(|| ("true".to_owned(), true));
            assert_eq!(value_of(&options, Control::CHANGE_STREAMS), wanted);
        }
    }
}
