//! Descriptions of packets.

use std::collections::BTreeMap;

use dcp_test::traces::{self, Scenario};
use dcp_test::vectors;
use dcp_wire::describe::{Description, FieldValue, Keys, describe};
use dcp_wire::message::Sasl;
use dcp_wire::sasl::encode_plain;
use dcp_wire::{Datatype, Frame, MAX_BODY_LEN, Opaque, Opcode, snappy};

use crate::frame;

fn text(description: &Description<'_>, name: &str) -> String {
    description.get(name).unwrap_or_else(|| panic!("no {name} in {description}")).to_string()
}

#[test]
fn packets_on_record_that_decode_are_described_without_a_problem() {
    let (mut described, mut problems) = (0, 0);
    for scenario in Scenario::load_all().unwrap() {
        for bytes in scenario.events.iter().filter_map(|event| event.packet()) {
            let Ok(Some((frame, _))) = Frame::parse(bytes, MAX_BODY_LEN) else { continue };
            let description = describe(&frame, Keys::Plain);
            let problem = description.get("problem").is_some();
            assert_eq!(problem, dcp_wire::message::Message::decode(&frame).is_err());
            let names: Vec<_> = description.fields.iter().map(|field| field.name).collect();
            assert_eq!(names[..2], ["magic", "opcode"]);
            assert_eq!(text(&description, "opaque"), format!("{:#x}", frame.header.opaque.0));
            described += 1;
            problems += usize::from(problem);
        }
    }
    println!("{described} packets described, {problems} with a problem");
    assert!(described > problems);
}

#[test]
fn document_compressed_with_xattrs_is_shown_in_full() {
    let plain = b"\0\0\0\x0f\0\0\0\x0b_k\0{\"a\":1}\0{\"name\":\"abcabcabcabcabcabc\"}";
    let value = snappy::compress(plain).unwrap();
    let mut out = Vec::new();
    let datatype = Datatype::JSON.with(Datatype::SNAPPY).with(Datatype::XATTR);
    Frame::request(Opcode::DCP_MUTATION)
        .with_datatype(datatype)
        .with_extras(&{
            let mut extras = [0; 31];
            extras[7] = 4;
            extras
        })
        .with_key(b"\x09airline_10")
        .with_value(&value)
        .encode(&mut out)
        .unwrap();
    let frame = frame(&out);
    let description = describe(&frame, Keys::WithCollection);
    assert_eq!(text(&description, "datatype"), "json,snappy,xattr");
    assert_eq!(text(&description, "seqno"), "4");
    assert_eq!(text(&description, "collection_id"), "0x9");
    assert_eq!(text(&description, "key"), "airline_10");
    assert_eq!(text(&description, "xattrs"), r#"[{name=_k value='{"a":1}'}]"#);
    let body = r#"{"name":"abcabcabcabcabcabc"}"#;
    assert_eq!(description.get("value"), Some(&FieldValue::Text(body.into())));
    // Without the agreement on collections the prefix is part of the key.
    let description = describe(&frame, Keys::Plain);
    assert_eq!(description.get("key"), Some(&FieldValue::Text("\tairline_10".into())));
}

#[test]
fn value_that_is_damaged_is_shown_as_it_is() {
    let mut out = Vec::new();
    Frame::request(Opcode::SET)
        .with_datatype(Datatype::SNAPPY)
        .with_extras(&[0; 8])
        .with_key(b"k")
        .with_value(&[0xff, 0xff, 0xff])
        .encode(&mut out)
        .unwrap();
    let frame = frame(&out);
    let description = describe(&frame, Keys::Plain);
    assert!(text(&description, "problem").contains("snappy"));
    assert_eq!(text(&description, "value"), "0xffffff");
}

#[test]
fn packet_that_is_malformed_is_shown_by_its_parts() {
    let mut out = Vec::new();
    let request = Frame::request(Opcode::DCP_STREAM_REQ).with_extras(&[7; 3]);
    request.with_key(b"k").encode(&mut out).unwrap();
    let frame = frame(&out);
    let description = describe(&frame, Keys::Plain);
    assert_eq!(text(&description, "problem"), "\"invalid length 1 of key\"");
    assert_eq!(text(&description, "extras"), "0x070707");
}

#[test]
fn password_is_not_shown() {
    let message = encode_plain("user", "pencil").unwrap();
    let mut out = Vec::new();
    Sasl { mechanism: b"PLAIN", message: &message }.encode_auth(Opaque(1), &mut out).unwrap();
    let frame = frame(&out);
    let description = describe(&frame, Keys::Plain);
    assert_eq!(text(&description, "username"), "user");
    assert!(!format!("{description}{description:?}").contains("pencil"));
}

#[test]
fn credentials_of_any_form_are_not_shown() {
    let mut token = Vec::new();
    let sasl = Sasl { mechanism: b"OAUTHBEARER", message: b"n,,\x01auth=Bearer pencil\x01\x01" };
    sasl.encode_auth(Opaque(1), &mut token).unwrap();
    let mut malformed = Vec::new();
    let request = Frame::request(Opcode::SASL_AUTH).with_extras(&[0]).with_key(b"PLAIN");
    request.with_value(b"\0user\0pencil").encode(&mut malformed).unwrap();
    for (packet, field) in [(token, "message"), (malformed, "value")] {
        let frame = frame(&packet);
        let description = describe(&frame, Keys::Plain);
        assert_eq!(description.get(field), Some(&FieldValue::Text("(not shown)".into())));
    }
}

#[test]
fn packet_fields_that_come_twice_are_a_list() {
    // Two stream ids, and a mutation that is none.
    let packet = [
        0x08, 0x57, 6, 0, 0, 0, 0, 3, 0, 0, 0, 6, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0x22, 0,
        7, 0x22, 0, 8,
    ];
    let frame = frame(&packet);
    let description = describe(&frame, Keys::Plain);
    assert_eq!(text(&description, "stream_id"), "[7, 8]");
    let names = description.fields.iter().filter(|field| field.name == "stream_id");
    assert_eq!(names.count(), 1);
}

#[test]
fn values_that_are_long_are_cut_in_the_one_line_form_only() {
    let value = vec![b'x'; 1000];
    let mut out = Vec::new();
    let request = Frame::request(Opcode::SET).with_extras(&[0; 8]).with_key(b"k");
    request.with_value(&value).encode(&mut out).unwrap();
    let frame = frame(&out);
    let description = describe(&frame, Keys::Plain);
    assert!(description.to_string().len() < 500);
    let Some(FieldValue::Text(text)) = description.get("value") else { panic!("no value") };
    assert_eq!(text.len(), 1000);
}

#[test]
fn hello_answer_tells_how_keys_are_written() {
    let (mut plain, mut with_collection) = (0, 0);
    for scenario in Scenario::load_all().unwrap() {
        for conn in scenario.connections() {
            let mut keys = Keys::default();
            // The recordings of replication begin after it.
            let mut agreed = false;
            let events = scenario.events.iter().filter(|event| event.conn == conn);
            for bytes in events.filter_map(|event| event.packet()) {
                let Ok(Some((frame, _))) = Frame::parse(bytes, MAX_BODY_LEN) else { continue };
                keys = keys.after(&frame);
                agreed |= frame.header.opcode == Opcode::HELLO;
                if !agreed || frame.header.opcode != Opcode::DCP_MUTATION {
                    continue;
                }
                // A key without a collection id would rarely begin with one.
                let description = describe(&frame, keys);
                assert_eq!(description.get("problem"), None, "{} {description}", scenario.name);
                let collection = description.get("collection_id").is_some();
                assert_eq!(collection, keys == Keys::WithCollection);
                if collection {
                    with_collection += 1;
                } else {
                    assert!(
                        frame.key.first().is_some_and(u8::is_ascii_graphic)
                            || !frame.key.is_ascii()
                    );
                    plain += 1;
                }
            }
        }
    }
    // Other recordings need not have both.
    assert!((plain > 0 && with_collection > 0) || !traces::is_own_folder());
}

#[test]
fn response_of_compressed_json_is_inflated() {
    let map = br#"{"rev":1,"name":"default","nodesExt":[],"padding":"aaaaaaaaaaaaaaaaaaaaaaaa"}"#;
    let value = snappy::compress(map).unwrap();
    let mut out = Vec::new();
    Frame::response(Opcode::GET_CLUSTER_CONFIG, dcp_wire::Status::SUCCESS)
        .with_datatype(Datatype::JSON.with(Datatype::SNAPPY))
        .with_value(&value)
        .encode(&mut out)
        .unwrap();
    let frame = frame(&out);
    let description = describe(&frame, Keys::Plain);
    let text = String::from_utf8(map.to_vec()).unwrap();
    assert_eq!(description.get("config"), Some(&FieldValue::Text(text.into())));
}

/// `tests/vectors/descriptions.txt` has a line for each golden packet, then one for the first
/// recorded packet of each kind.
#[test]
fn packets_are_described_as_on_record() {
    if !traces::is_own_folder() {
        return;
    }
    let mut lines = Vec::new();
    for name in ["golden-packets", "snapshot-markers"] {
        for vector in vectors::load(name).unwrap() {
            let Ok(Some((frame, _))) = Frame::parse(&vector.bytes, MAX_BODY_LEN) else { continue };
            lines.push(format!("{} {}", vector.row, describe(&frame, Keys::WithCollection)));
        }
    }
    let mut first = BTreeMap::new();
    for scenario in Scenario::load_all().unwrap() {
        for bytes in scenario.events.iter().filter_map(|event| event.packet()) {
            let Ok(Some((frame, _))) = Frame::parse(bytes, MAX_BODY_LEN) else { continue };
            let header = frame.header;
            let status = header.magic.is_response().then_some(header.vbid_or_status);
            let kind = (header.magic.0, header.opcode.0, status);
            first.entry(kind).or_insert_with(|| describe(&frame, Keys::Plain).to_string());
        }
    }
    lines.extend(first.into_values());
    let recorded = include_str!("../../../../tests/vectors/descriptions.txt");
    let recorded: Vec<&str> = recorded.lines().collect();
    for (line, recorded) in lines.iter().zip(&recorded) {
        assert_eq!(line, recorded);
    }
    assert_eq!(lines.len(), recorded.len(), "{}", lines[recorded.len()..].join("\n"));
}
