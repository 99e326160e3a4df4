//! Packets as readable names and values, for decoding tools.
//!
//! Nothing is refused: a packet that does not have the layout of its opcode is described by its
//! parts, with the reason in a field `problem`. Layouts that servers no longer send are still
//! described, such as version 2.1 of the snapshot marker.
//!
//! Keys and values of documents are shown, so never log a description. Only secrets that would
//! allow a login are omitted, such as the password of a PLAIN authentication.
//!
//! ```
//! use dcp_wire::describe::{Keys, describe};
//! use dcp_wire::{Frame, MAX_BODY_LEN};
//!
//! let packet = [
//!     0x80, 0x55, 0, 0, 4, 0, 0, 3, 0, 0, 0, 4, 0, 0, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2,
//! ];
//! let (frame, _) = Frame::parse(&packet, MAX_BODY_LEN)?.expect("a whole packet");
//! let description = describe(&frame, Keys::Plain);
//! assert_eq!(
//!     description.to_string(),
//!     "ClientRequest DCP_STREAM_END vbucket=3 opaque=0x1000 cas=0x0 datatype=raw length=28 \
//!      reason=StateChanged"
//! );
//! # Ok::<(), dcp_wire::DecodeError>(())
//! ```

mod document;
mod request;
mod response;

use std::borrow::Cow;
use std::fmt;

use crate::framing_extras::FrameInfo;
use crate::message::{Message, Response};
use crate::{Feature, Frame, Magic, Opcode};

/// Whether document keys begin with a collection id. HELLO negotiates this; packets do not show it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Keys {
    /// Keys are plain.
    #[default]
    Plain,
    /// Keys begin with a collection id.
    WithCollection,
}

impl Keys {
    /// The form of keys in the packets after `frame` on the same connection: the response to HELLO
    /// decides it.
    #[must_use]
    pub fn after(self, frame: &Frame<'_>) -> Self {
        match Message::decode(frame) {
            Ok(Message::Response(Response::Hello(granted))) => {
                if granted.contains(Feature::COLLECTIONS) {
                    Self::WithCollection
                } else {
                    Self::Plain
                }
            }
            _ => self,
        }
    }
}

/// A packet as names and values.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Description<'a> {
    /// The header's fields, then the message's own, in the order of the packet. Names are unique.
    pub fields: Vec<Field<'a>>,
}

/// A name and its value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Field<'a> {
    /// Name, as in the protocol.
    pub name: &'static str,
    /// Value.
    pub value: FieldValue<'a>,
}

/// A value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FieldValue<'a> {
    /// A flag.
    Bool(bool),
    /// A number.
    U64(u64),
    /// A number that may be negative.
    I64(i64),
    /// A number usually written in hex.
    Hex(u64),
    /// Text.
    Text(Cow<'a, str>),
    /// Bytes that are not text.
    Bytes(Cow<'a, [u8]>),
    /// Several values.
    List(Vec<Self>),
    /// Nested fields.
    Record(Vec<Field<'a>>),
}

/// Describes a packet.
#[must_use]
pub fn describe<'a>(frame: &Frame<'a>, keys: Keys) -> Description<'a> {
    let mut fields = Fields::default();
    header(frame, &mut fields);
    match Message::decode(frame) {
        Ok(Message::Request(message)) => request::describe(frame, &message, keys, &mut fields),
        Ok(Message::Response(message)) => response::describe(frame, &message, keys, &mut fields),
        Ok(Message::ClusterMapChange(change)) => request::cluster_map_change(&change, &mut fields),
        Ok(Message::Raw(_)) => parts(frame, &mut fields),
        Err(error) => {
            if frame.header.opcode != Opcode::DCP_SNAPSHOT_MARKER
                || !request::abandoned_snapshot_marker(frame, &mut fields)
            {
                fields.text("problem", error.to_string());
                parts(frame, &mut fields);
            }
        }
    }
    Description { fields: fields.0 }
}

fn header<'a>(frame: &Frame<'a>, fields: &mut Fields<'a>) {
    let header = &frame.header;
    fields.text("magic", header.magic.to_string());
    let pushed = header.magic == Magic::SERVER_REQUEST || header.magic == Magic::SERVER_RESPONSE;
    fields.text(
        "opcode",
        // Server requests have their own numbers.
        match header.opcode {
            Opcode::CLUSTER_MAP_CHANGE if pushed => "CLUSTER_MAP_CHANGE".to_owned(),
            opcode if pushed => format!("{:#x}", opcode.0),
            opcode => opcode.to_string(),
        },
    );
    if header.magic.is_response() {
        fields.text("status", header.status().to_string());
    } else {
        fields.u64("vbucket", header.vbid().0);
    }
    fields.hex("opaque", header.opaque.0);
    fields.hex("cas", header.cas.0);
    fields.text("datatype", header.datatype.to_string());
    fields.u64("length", u64::try_from(frame.packet_len()).unwrap_or(u64::MAX));
    for info in frame.frame_infos() {
        match info {
            Ok(info) => frame_info(header.magic, info, fields),
            Err(error) => fields.text("problem", error.to_string()),
        }
    }
}

fn frame_info<'a>(magic: Magic, info: FrameInfo<'a>, fields: &mut Fields<'a>) {
    match (magic.is_response(), info.id, info.payload) {
        (false, FrameInfo::STREAM_ID, &[high, low]) => {
            fields.u64("stream_id", u16::from_be_bytes([high, low]));
        }
        (false, FrameInfo::DURABILITY, &[level, ..]) => fields.u64("durability_level", level),
        (true, FrameInfo::SERVER_DURATION, &[high, low]) => {
            fields.u64("server_duration_us", server_duration_us([high, low]));
        }
        (_, id, payload) => {
            let mut record = Fields::default();
            record.u64("id", id);
            record.bytes("payload", payload);
            fields.push("frame_info", FieldValue::Record(record.0));
        }
    }
}

/// Decodes the time a server spent, in microseconds, from its two-byte form.
fn server_duration_us(encoded: [u8; 2]) -> u64 {
    let micros = f64::from(u16::from_be_bytes(encoded)).powf(1.74) / 2.0;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "at most 120 million, never negative"
    )]
    {
        micros as u64
    }
}

/// The parts of a packet with an unknown layout.
fn parts<'a>(frame: &Frame<'a>, fields: &mut Fields<'a>) {
    let is_secret = matches!(frame.header.opcode, Opcode::SASL_AUTH | Opcode::SASL_STEP);
    for (name, bytes) in [("extras", frame.extras), ("key", frame.key), ("value", frame.value)] {
        match bytes {
            [] => {}
            _ if is_secret && name == "value" => fields.text(name, NOT_SHOWN),
            _ => fields.bytes(name, bytes),
        }
    }
}

/// Replaces secrets.
const NOT_SHOWN: &str = "(not shown)";

/// Collects fields.
#[derive(Default)]
struct Fields<'a>(Vec<Field<'a>>);

impl<'a> Fields<'a> {
    /// Adds a field; what a packet says twice becomes a list, since readers look for a name once.
    fn push(&mut self, name: &'static str, value: FieldValue<'a>) {
        let Some(field) = self.0.iter_mut().find(|field| field.name == name) else {
            return self.0.push(Field { name, value });
        };
        match &mut field.value {
            FieldValue::List(values) => values.push(value),
            first => {
                let first = std::mem::replace(first, FieldValue::Bool(false));
                field.value = FieldValue::List(vec![first, value]);
            }
        }
    }

    fn bool(&mut self, name: &'static str, value: bool) {
        self.push(name, FieldValue::Bool(value));
    }

    fn u64(&mut self, name: &'static str, value: impl Into<u64>) {
        self.push(name, FieldValue::U64(value.into()));
    }

    fn hex(&mut self, name: &'static str, value: impl Into<u64>) {
        self.push(name, FieldValue::Hex(value.into()));
    }

    fn text(&mut self, name: &'static str, value: impl Into<Cow<'a, str>>) {
        self.push(name, FieldValue::Text(value.into()));
    }

    fn bytes(&mut self, name: &'static str, value: &'a [u8]) {
        self.push(name, FieldValue::Bytes(Cow::Borrowed(value)));
    }

    /// Bytes that mostly are text.
    fn readable(&mut self, name: &'static str, value: &'a [u8]) {
        self.push(name, FieldValue::readable(value));
    }

    /// A set of bits: the number, and the names of the bits that are set.
    fn flags<B: bitflags::Flags<Bits = u32>>(&mut self, flags: &B) {
        self.hex("flags", flags.bits());
        let names = flags.iter_names().filter(|(name, _)| *name != "_");
        let names = names.map(|(name, _)| FieldValue::Text(name.to_lowercase().into()));
        self.push("flag_names", FieldValue::List(names.collect()));
    }
}

impl<'a> FieldValue<'a> {
    /// Text if the bytes are UTF-8, else the bytes.
    fn readable(bytes: &'a [u8]) -> Self {
        match str::from_utf8(bytes) {
            Ok(text) => Self::Text(Cow::Borrowed(text)),
            Err(_) => Self::Bytes(Cow::Borrowed(bytes)),
        }
    }
}

impl<'a> Description<'a> {
    /// The value of the first field with a name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&FieldValue<'a>> {
        self.fields.iter().find(|field| field.name == name).map(|field| &field.value)
    }
}

/// Longest text shown in one line, in characters, and longest run of bytes.
const MAX_SHOWN: usize = 200;

impl fmt::Display for Description<'_> {
    /// One line; long values are cut.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        for Field { name, value } in &self.fields {
            match (*name, value) {
                ("magic" | "opcode", FieldValue::Text(text)) => write!(f, "{separator}{text}")?,
                _ => write!(f, "{separator}{name}={value}")?,
            }
            separator = " ";
        }
        Ok(())
    }
}

impl fmt::Display for FieldValue<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Bool(value) => value.fmt(f),
            Self::U64(value) => value.fmt(f),
            Self::I64(value) => value.fmt(f),
            Self::Hex(value) => write!(f, "{value:#x}"),
            Self::Text(text) => fmt_text(text, f),
            Self::Bytes(bytes) => {
                f.write_str("0x")?;
                bytes.iter().take(MAX_SHOWN).try_for_each(|byte| write!(f, "{byte:02x}"))?;
                cut(bytes.len(), f)
            }
            Self::List(values) => {
                f.write_str("[")?;
                for (index, value) in values.iter().enumerate() {
                    write!(f, "{}{value}", if index == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Self::Record(fields) => {
                f.write_str("{")?;
                for (index, Field { name, value }) in fields.iter().enumerate() {
                    write!(f, "{}{name}={value}", if index == 0 { "" } else { " " })?;
                }
                f.write_str("}")
            }
        }
    }
}

/// Plain words as they are, anything else in quotes; JSON stays readable.
fn fmt_text(text: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.,:/@".contains(c);
    if !text.is_empty() && text.chars().all(plain) && text.len() <= MAX_SHOWN {
        return f.write_str(text);
    }
    let shown: String = text.chars().take(MAX_SHOWN).collect();
    if shown.contains('"') && !shown.contains(|c: char| c == '\'' || c.is_control()) {
        write!(f, "'{shown}'")?;
    } else {
        write!(f, "{shown:?}")?;
    }
    cut(text.chars().count(), f)
}

fn cut(len: usize, f: &mut fmt::Formatter<'_>) -> fmt::Result {
    if len > MAX_SHOWN {
        write!(f, "...({len})")?;
    }
    Ok(())
}
