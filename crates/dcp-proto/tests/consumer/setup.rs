//! The rows of connections that are set up: what a consumer sends, and what it makes of the answers.

use bytes::BytesMut;
use dcp_proto::consumer::{
    Auth, Bootstrap, BootstrapConfig, BootstrapError, BootstrapOutcome, ControlSetting, DcpOpen,
};
use dcp_test::login::Login;
use dcp_test::packet::{Packet, packets};
use dcp_wire::message::{Control, Features, Open, OpenFlags};
use dcp_wire::{Datatype, DecodeError, Feature, Frame, Opcode, Status};

const WINDOW: u32 = 512;

fn config() -> BootstrapConfig {
    let mut config =
        BootstrapConfig::new(Auth::Certificate, Some("default".to_owned()), "10.0.0.1");
    config.dcp = Some(DcpOpen::new("n", OpenFlags::INCLUDE_DELETE_TIMES, WINDOW, 20));
    config
}

/// Sets a connection up with a server that answers the control `refused` with its status.
fn set_up(
    server: &mut Login,
    config: BootstrapConfig,
    refused: (&str, Status),
) -> Result<BootstrapOutcome, BootstrapError> {
    let mut bootstrap = Bootstrap::new(config)?;
    while !bootstrap.is_done() {
        let mut out = BytesMut::new();
        while bootstrap.poll_transmit(&mut out) {}
        for request in packets(&out) {
            let mut answer = server.answer(&request);
            if request.opcode() == Opcode::DCP_CONTROL
                && request.frame().key == refused.0.as_bytes()
            {
                answer[6..8].copy_from_slice(&refused.1.0.to_be_bytes());
            }
            bootstrap.handle_bytes(&mut BytesMut::from(&answer[..]))?;
        }
    }
    Ok(bootstrap.take_outcome().expect("it is done"))
}

const NOTHING: (&str, Status) = ("", Status::SUCCESS);

fn sent(server: &Login, opcode: Opcode) -> Vec<&Packet> {
    server.seen.iter().filter(|seen| seen.opcode() == opcode).collect()
}

/// The controls that were sent, in order.
fn controls(server: &Login) -> Vec<(String, String)> {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("text");
    let controls = sent(server, Opcode::DCP_CONTROL).into_iter();
    controls.map(|packet| (text(packet.frame().key), text(packet.frame().value))).collect()
}

fn value_of(server: &Login, key: &str) -> Option<String> {
    controls(server).into_iter().find_map(|(name, value)| (name == key).then_some(value))
}

fn with(setting: ControlSetting) -> BootstrapConfig {
    let mut config = config();
    config.dcp = config.dcp.map(|dcp| dcp.with(setting));
    config
}

#[test]
fn ct_03_and_ct_04_and_sr_23_noops_are_on_before_anything_that_needs_them() {
    let mut server = Login::default();
    set_up(&mut server, config(), NOTHING).unwrap();
    let noops: Vec<_> = controls(&server).into_iter().take(2).collect();
    let pair = |key: &str, value: &str| (key.to_owned(), value.to_owned());
    assert_eq!(noops, [pair("enable_noop", "true"), pair("set_noop_interval", "20")]);
    for key in ["enable_noop", "set_noop_interval"] {
        let error = set_up(&mut Login::default(), config(), (key, Status::EINVAL)).unwrap_err();
        let BootstrapError::ControlRefused { key: refused, status, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((refused, status), (key, Status::EINVAL));
    }
}

#[test]
fn ct_13_compression_is_asked_for_of_servers_that_compress() {
    let compressed = || {
        let setting = ControlSetting::optional(Control::FORCE_VALUE_COMPRESSION, true);
        with(setting.needing(Feature::SNAPPY))
    };
    let mut server = Login::default();
    let outcome = set_up(&mut server, compressed(), NOTHING).unwrap();
    assert_eq!(value_of(&server, "force_value_compression").as_deref(), Some("true"));
    assert!(outcome.has_control(Control::FORCE_VALUE_COMPRESSION));
}

#[test]
fn ct_12_compression_is_not_asked_for_without_snappy() {
    let setting = ControlSetting::optional(Control::FORCE_VALUE_COMPRESSION, true);
    let config = with(setting.needing(Feature::SNAPPY));
    let features = config.features.iter().copied().filter(|&feature| feature != Feature::SNAPPY);
    let mut server = Login { features: Some(features.collect()), ..Login::default() };
    let outcome = set_up(&mut server, config, NOTHING).unwrap();
    assert_eq!(value_of(&server, "force_value_compression"), None);
    assert!(!outcome.has_control(Control::FORCE_VALUE_COMPRESSION));
}

#[test]
fn ct_23_a_server_without_out_of_order_snapshots_is_read_in_order() {
    let key = Control::ENABLE_OUT_OF_ORDER_SNAPSHOTS;
    for (status, taken) in [(Status::SUCCESS, true), (Status::EINVAL, false)] {
        let mut server = Login::default();
        let config = with(ControlSetting::optional(key, "true_with_seqno_advanced"));
        let outcome = set_up(&mut server, config, (key, status)).unwrap();
        assert_eq!(value_of(&server, key).as_deref(), Some("true_with_seqno_advanced"));
        assert_eq!(outcome.has_control(key), taken);
    }
}

#[test]
fn ct_09_and_ct_21_a_server_without_priority_or_order_of_backfills_is_read_without_them() {
    for (key, value) in [(Control::SET_PRIORITY, "high"), (Control::BACKFILL_ORDER, "sequential")] {
        for (status, taken) in [
            (Status::SUCCESS, true),
            (Status::EINVAL, false),
            (Status::NOT_SUPPORTED, false),
            (Status::UNKNOWN_COMMAND, false),
        ] {
            let mut server = Login::default();
            let config = with(ControlSetting::optional(key, value));
            let outcome = set_up(&mut server, config, (key, status)).unwrap();
            assert_eq!(value_of(&server, key).as_deref(), Some(value));
            assert_eq!(outcome.has_control(key), taken, "{key}: {status}");
        }
    }
}

#[test]
fn ct_25_history_that_is_not_kept_is_an_error() {
    let config = with(ControlSetting::required(Control::CHANGE_STREAMS, true));
    let refused = (Control::CHANGE_STREAMS, Status::NOT_SUPPORTED);
    let error = set_up(&mut Login::default(), config, refused).unwrap_err();
    let BootstrapError::ControlRefused { key, status, .. } = error else { panic!("{error}") };
    assert_eq!((key, status), (Control::CHANGE_STREAMS, Status::NOT_SUPPORTED));
}

#[test]
fn ct_26_marker_version_2_2_is_for_servers_with_collections() {
    let key = Control::MAX_MARKER_VERSION;
    let mut server = Login::default();
    assert!(set_up(&mut server, config(), NOTHING).unwrap().has_control(key));
    assert_eq!(value_of(&server, key).as_deref(), Some("2.2"));
    let refused = (key, Status::NOT_SUPPORTED);
    assert!(!set_up(&mut Login::default(), config(), refused).unwrap().has_control(key));

    let mut server = Login { features: Some(vec![Feature::XERROR]), ..Login::default() };
    assert!(!set_up(&mut server, config(), NOTHING).unwrap().has_control(key));
    assert_eq!(value_of(&server, key), None);
}

#[test]
fn ct_31_and_op_17_controls_follow_the_one_dcp_open() {
    let mut server = Login::default();
    set_up(&mut server, config(), NOTHING).unwrap();
    let is_dcp = |seen: &&Packet| [Opcode::DCP_OPEN, Opcode::DCP_CONTROL].contains(&seen.opcode());
    let dcp: Vec<Opcode> = server.seen.iter().filter(is_dcp).map(Packet::opcode).collect();
    assert_eq!(dcp[0], Opcode::DCP_OPEN);
    assert_eq!(dcp[1..], vec![Opcode::DCP_CONTROL; 7]);
}

#[test]
fn fc_01_the_server_is_told_the_window() {
    let mut server = Login::default();
    set_up(&mut server, config(), NOTHING).unwrap();
    assert_eq!(value_of(&server, "connection_buffer_size").as_deref(), Some("512"));
}

#[test]
fn op_01_and_op_09_a_producer_is_opened_with_the_flags_asked_for() {
    let user_xattrs = OpenFlags::INCLUDE_XATTRS | OpenFlags::INCLUDE_DELETED_USER_XATTRS;
    let flags = [(OpenFlags::empty(), 0x001), (OpenFlags::PRODUCER, 0x001), (user_xattrs, 0x105)];
    for (flags, wanted) in flags {
        let mut server = Login::default();
        let mut config = config();
        config.dcp = Some(DcpOpen::new("n", flags, WINDOW, 20));
        set_up(&mut server, config, NOTHING).unwrap();
        let frame = sent(&server, Opcode::DCP_OPEN)[0].frame();
        let open = Open::decode(&frame).unwrap();
        assert_eq!((open.flags.bits(), open.name), (wanted, &b"n"[..]));
        assert_eq!((open.value, open.datatype), (&b""[..], Datatype::RAW));
    }
}

#[test]
fn op_03_a_connection_without_a_name_is_not_opened() {
    let mut config = config();
    config.dcp = Some(DcpOpen::new("", OpenFlags::empty(), WINDOW, 20));
    let error = set_up(&mut Login::default(), config, NOTHING).unwrap_err();
    assert_eq!(error, BootstrapError::TooLong { what: "the connection name" });
}

#[test]
fn op_19_and_op_20_a_refused_open_has_its_error() {
    let refused = |status| {
        let mut server = Login::answering(Opcode::DCP_OPEN, status, b"");
        set_up(&mut server, config(), NOTHING).unwrap_err()
    };
    assert_eq!(refused(Status::EACCESS), BootstrapError::DcpAccess);
    let error = refused(Status::NO_BUCKET);
    let is_refusal = matches!(error, BootstrapError::Status { opcode: Opcode::DCP_OPEN, .. });
    assert_eq!((is_refusal, error.status()), (true, Some(Status::NO_BUCKET)));
}

#[test]
fn ax_02_and_ax_04_features_are_asked_for_once_and_with_what_they_need() {
    let mut server = Login::default();
    set_up(&mut server, config(), NOTHING).unwrap();
    let hellos = sent(&server, Opcode::HELLO);
    assert_eq!(hellos.len(), 1);
    let asked: Vec<Feature> = Features::decode(hellos[0].frame().value).unwrap().iter().collect();
    assert!(asked.contains(&Feature(0x0d)) && asked.contains(&Feature(0x0c)), "{asked:?}");
}

#[test]
fn ax_03_a_bucket_without_collections_is_read_without_them() {
    let features = BootstrapConfig::FEATURES.into_iter().filter(|feature| feature.0 != 0x12);
    let mut server = Login { features: Some(features.collect()), ..Login::default() };
    let outcome = set_up(&mut server, config(), NOTHING).unwrap();
    assert!(!outcome.has_feature(Feature::COLLECTIONS) && outcome.manifest.is_none());
    assert!(!server.was_asked(Opcode::GET_COLLECTIONS_MANIFEST));
    assert_eq!(value_of(&server, "flatbuffers_system_events"), None);
}

#[test]
fn np_15_a_malformed_noop_ends_the_set_up() {
    for noop in [
        Frame::request(Opcode::DCP_NOOP).with_extras(b"x"),
        Frame::request(Opcode::DCP_NOOP).with_key(b"x"),
        Frame::request(Opcode::DCP_NOOP).with_value(b"x"),
    ] {
        let mut bootstrap = Bootstrap::new(config()).unwrap();
        let error = bootstrap.handle_frame(&parsed(noop).frame()).unwrap_err();
        assert!(
            matches!(error, BootstrapError::Decode(DecodeError::TrailingBytes { .. })),
            "{error}"
        );
    }
}

/// A packet as it comes, with its lengths.
fn parsed(frame: Frame<'_>) -> Packet {
    packets(&dcp_test::packet::encoded(&frame)).remove(0)
}
