//! The DNS messages of one question for service records (RFC 1035, RFC 2782).

use dcp_wire::{DecodeError, Reader};
use thiserror::Error;

const TYPE_SRV: u16 = 33;
const CLASS_IN: u16 = 1;

/// Most nodes taken from one answer.
const MAX_SERVICES: usize = 64;

/// Most pointers followed within one name: each must point further back, this bounds the work.
const MAX_POINTERS: usize = 16;

/// Longest name, in bytes as text.
const MAX_NAME_LEN: usize = 253;

/// Why a DNS message is of no use.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(crate) enum InvalidMessage {
    /// It answers another question.
    #[error("the answer is to another question")]
    NotOurs,
    /// It is cut short or contradicts itself.
    #[error("malformed DNS answer")]
    Malformed,
    /// The server gives an error code.
    #[error("the name server answered with error {0}")]
    Refused(u16),
    /// The name does not fit a question.
    #[error("the host name cannot be looked up")]
    Name,
}

impl From<DecodeError> for InvalidMessage {
    fn from(_: DecodeError) -> Self {
        Self::Malformed
    }
}

/// One service record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Service {
    /// Lower is tried first.
    pub(super) priority: u16,
    /// Share among those of one priority.
    pub(super) weight: u16,
    /// Port of the service.
    pub(super) port: u16,
    /// Host that offers it.
    pub(super) target: String,
}

/// What a name server says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// The records.
    Services(Vec<Service>),
    /// There are more than fit a datagram.
    Truncated,
}

/// The question for the service records of `name`.
pub(super) fn question(id: u16, name: &str) -> Result<Vec<u8>, InvalidMessage> {
    let mut message = Vec::with_capacity(name.len() + 18);
    // Recursion desired; one question.
    for word in [id, 0x0100, 1, 0, 0, 0] {
        message.extend_from_slice(&word.to_be_bytes());
    }
    let name = name.strip_suffix('.').unwrap_or(name);
    if name.len() > MAX_NAME_LEN {
        return Err(InvalidMessage::Name);
    }
    for label in name.split('.') {
        let len = u8::try_from(label.len()).ok().filter(|len| (1..=63).contains(len));
        message.push(len.ok_or(InvalidMessage::Name)?);
        message.extend_from_slice(label.as_bytes());
    }
    message.push(0);
    message.extend_from_slice(&TYPE_SRV.to_be_bytes());
    message.extend_from_slice(&CLASS_IN.to_be_bytes());
    Ok(message)
}

/// Reads the answer to question `id` for `name`.
pub(super) fn answer(message: &[u8], id: u16, name: &str) -> Result<Answer, InvalidMessage> {
    let mut reader = Reader::new(message, "DNS message");
    let found = reader.u16()?;
    let flags = reader.u16()?;
    let (questions, answers) = (reader.u16()?, reader.u16()?);
    reader.u32()?;
    if found != id || flags & 0x8000 == 0 || questions != 1 {
        return Err(InvalidMessage::NotOurs);
    }
    let asked = read_name(message, &mut reader)?;
    let kind = (reader.u16()?, reader.u16()?);
    if !asked.eq_ignore_ascii_case(name.trim_end_matches('.')) || kind != (TYPE_SRV, CLASS_IN) {
        return Err(InvalidMessage::NotOurs);
    }
    match flags & 0x000f {
        0 => {}
        code => return Err(InvalidMessage::Refused(code)),
    }
    if flags & 0x0200 != 0 {
        return Ok(Answer::Truncated);
    }
    let mut services = Vec::new();
    for _ in 0..answers {
        read_name(message, &mut reader)?;
        let kind = (reader.u16()?, reader.u16()?);
        reader.u32()?;
        let len = usize::from(reader.u16()?);
        let mut data = Reader::new(reader.bytes(len)?, "DNS record");
        // A record of another type is an alias on the way, or a signature.
        if kind == (TYPE_SRV, CLASS_IN) && services.len() < MAX_SERVICES {
            let (priority, weight, port) = (data.u16()?, data.u16()?, data.u16()?);
            let target = read_name(message, &mut data)?;
            // The root as a target means that there is no such service.
            if !target.is_empty() && port != 0 {
                services.push(Service { priority, weight, port, target });
            }
        }
    }
    Ok(Answer::Services(services))
}

/// Reads a name, which may go on earlier in the message.
fn read_name<'a>(message: &'a [u8], reader: &mut Reader<'a>) -> Result<String, InvalidMessage> {
    let mut name = String::new();
    // Moves on in the record until the first pointer, and elsewhere from then on.
    let mut elsewhere: Option<Reader<'a>> = None;
    let mut pointers = 0;
    loop {
        let at = elsewhere.as_mut().unwrap_or(reader);
        let len = at.u8()?;
        match len {
            0 => return Ok(name),
            1..=63 => {
                let label = at.bytes(usize::from(len))?;
                push_label(&mut name, label)?;
            }
            0xc0.. => {
                let offset = usize::from(u16::from_be_bytes([len & 0x3f, at.u8()?]));
                pointers += 1;
                let target = message.get(offset..).filter(|_| pointers <= MAX_POINTERS);
                let target = target.ok_or(InvalidMessage::Malformed)?;
                elsewhere = Some(Reader::new(target, "DNS name"));
            }
            _ => return Err(InvalidMessage::Malformed),
        }
    }
}

/// Appends a label of the characters host and service names are made of.
fn push_label(name: &mut String, label: &[u8]) -> Result<(), InvalidMessage> {
    let allowed = |&byte: &u8| byte.is_ascii_alphanumeric() || byte == b'-' || byte == b'_';
    if !label.iter().all(allowed) || name.len() + label.len() + 1 > MAX_NAME_LEN {
        return Err(InvalidMessage::Malformed);
    }
    if !name.is_empty() {
        name.push('.');
    }
    name.extend(label.iter().copied().map(char::from));
    Ok(())
}
