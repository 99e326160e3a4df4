//! Any response, decoded by its opcode and status.

use bytes::BufMut;

use super::{
    FailoverEntries, Features, LookupResults, Metadata, MutationResults, MutationToken,
    ObservedSeqno, ResolvedName, VbSeqnos, encode_failover_log, extras, no_key, no_value,
    rollback_seqno,
};
use crate::{DecodeError, EncodeError, Frame, Opaque, Opcode, Seqno, Status};

/// The body of a response; its status is in the header.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub enum Response<'a> {
    /// A cluster map as JSON.
    ClusterConfig(&'a [u8]),
    /// The collections manifest as JSON.
    CollectionsManifest(&'a [u8]),
    /// A counter's new value.
    Counter(Option<MutationToken>, u64),
    /// A document: its flags, the key if requested, and the value.
    Document(u32, &'a [u8], &'a [u8]),
    /// Nothing.
    Empty,
    /// An error: empty, or usually JSON; a cluster map for NOT_MY_VBUCKET.
    Error(&'a [u8]),
    /// The error map as JSON.
    ErrorMap(&'a [u8]),
    /// A failover log.
    FailoverLog(FailoverEntries<'a>),
    /// The granted features.
    Hello(Features<'a>),
    /// Results of a sub-document lookup.
    LookupResults(LookupResults<'a>),
    /// A document's metadata.
    Metadata(Metadata),
    /// Results of a sub-document mutation.
    MutationResults(MutationResults<'a>),
    /// Seqnos and branch of a vBucket.
    ObservedSeqno(ObservedSeqno),
    /// Id of a collection or scope.
    ResolvedName(ResolvedName),
    /// The seqno to roll back to.
    Rollback(Seqno),
    /// Space-separated names of SASL mechanisms.
    SaslMechanisms(&'a [u8]),
    /// The server's authentication message, which may be empty.
    SaslMessage(&'a [u8]),
    /// One statistic: name and value.
    Stat(&'a [u8], &'a [u8]),
    /// The opaque of a stream that a consumer opened.
    StreamAdded(Opaque),
    /// High seqnos of vBuckets.
    VbSeqnos(VbSeqnos<'a>),
    /// The server's version.
    Version(&'a [u8]),
    /// vbuuid and seqno of a write.
    Written(MutationToken),
}

impl<'a> Response<'a> {
    /// Reads a response; `None` for one without a type of its own.
    pub(super) fn decode(frame: &Frame<'a>) -> Result<Option<Self>, DecodeError> {
        let status = frame.header.status();
        let opcode = frame.header.opcode;
        if opcode == Opcode::DCP_STREAM_REQ && status == Status::ROLLBACK {
            extras::<0>(frame)?;
            no_key(frame)?;
            return rollback_seqno(frame).map(|seqno| Some(Self::Rollback(seqno)));
        }
        match (opcode, status) {
            (_, Status::SUCCESS)
            | (Opcode::SASL_AUTH | Opcode::SASL_STEP, Status::AUTH_CONTINUE) => {
                Self::decode_success(frame)
            }
            (
                Opcode::SUBDOC_MULTI_LOOKUP | Opcode::SUBDOC_MULTI_MUTATION,
                Status::SUBDOC_SUCCESS_DELETED
                | Status::SUBDOC_MULTI_PATH_FAILURE
                | Status::SUBDOC_MULTI_PATH_FAILURE_DELETED,
            ) => Self::decode_success(frame),
            _ if frame.extras.is_empty() && frame.key.is_empty() => {
                Ok(Some(Self::Error(frame.value)))
            }
            _ => Ok(None),
        }
    }

    fn decode_success(frame: &Frame<'a>) -> Result<Option<Self>, DecodeError> {
        let value = frame.value;
        Ok(Some(match frame.header.opcode {
            Opcode::HELLO => Self::Hello(Features::decode(only_value(frame)?)?),
            Opcode::SASL_LIST_MECHS => Self::SaslMechanisms(only_value(frame)?),
            Opcode::SASL_AUTH | Opcode::SASL_STEP => Self::SaslMessage(only_value(frame)?),
            Opcode::GET_ERROR_MAP => Self::ErrorMap(only_value(frame)?),
            Opcode::GET_CLUSTER_CONFIG => Self::ClusterConfig(only_value(frame)?),
            Opcode::GET_COLLECTIONS_MANIFEST => Self::CollectionsManifest(only_value(frame)?),
            Opcode::VERSION => Self::Version(only_value(frame)?),
            Opcode::DCP_STREAM_REQ | Opcode::DCP_GET_FAILOVER_LOG | Opcode::GET_FAILOVER_LOG => {
                Self::FailoverLog(FailoverEntries::decode(only_value(frame)?)?)
            }
            Opcode::GET_ALL_VB_SEQNOS => Self::VbSeqnos(VbSeqnos::decode(only_value(frame)?)?),
            Opcode::OBSERVE_SEQNO => {
                Self::ObservedSeqno(ObservedSeqno::decode(only_value(frame)?)?)
            }
            Opcode::GET_COLLECTION_ID | Opcode::GET_SCOPE_ID => {
                no_key(frame)?;
                no_value(frame)?;
                Self::ResolvedName(ResolvedName::decode(frame)?)
            }
            Opcode::STAT => {
                extras::<0>(frame)?;
                Self::Stat(frame.key, value)
            }
            Opcode::DCP_ADD_STREAM => {
                no_key(frame)?;
                no_value(frame)?;
                Self::StreamAdded(Opaque(u32::from_be_bytes(extras(frame)?)))
            }
            Opcode::GET | Opcode::GET_AND_TOUCH => {
                Self::Document(u32::from_be_bytes(extras(frame)?), frame.key, value)
            }
            Opcode::GET_META => {
                no_key(frame)?;
                no_value(frame)?;
                Self::Metadata(Metadata::decode(frame)?)
            }
            Opcode::INCREMENT | Opcode::DECREMENT => {
                no_key(frame)?;
                Self::Counter(MutationToken::decode(frame)?, counter_value(value)?)
            }
            Opcode::SUBDOC_MULTI_LOOKUP => {
                Self::LookupResults(LookupResults::decode(only_value(frame)?)?)
            }
            Opcode::SUBDOC_MULTI_MUTATION => {
                no_key(frame)?;
                Self::MutationResults(MutationResults::decode(frame)?)
            }
            Opcode::SET
            | Opcode::ADD
            | Opcode::REPLACE
            | Opcode::DELETE
            | Opcode::SET_WITH_META
            | Opcode::ADD_WITH_META
            | Opcode::DELETE_WITH_META => {
                no_key(frame)?;
                no_value(frame)?;
                MutationToken::decode(frame)?.map_or(Self::Empty, Self::Written)
            }
            opcode if opcode.name().is_some() && is_empty(frame) => Self::Empty,
            _ => return Ok(None),
        }))
    }

    /// Appends the packet to `out`, in a frame whose header is already filled in.
    pub(super) fn write(&self, frame: Frame<'_>, out: &mut impl BufMut) -> Result<(), EncodeError> {
        match self {
            Self::Empty => frame.encode(out),
            Self::ClusterConfig(value)
            | Self::CollectionsManifest(value)
            | Self::Error(value)
            | Self::ErrorMap(value)
            | Self::SaslMechanisms(value)
            | Self::SaslMessage(value)
            | Self::Version(value) => frame.with_value(value).encode(out),
            Self::Hello(features) => frame.with_value(features.as_bytes()).encode(out),
            Self::LookupResults(results) => frame.with_value(results.value).encode(out),
            Self::VbSeqnos(seqnos) => frame.with_value(seqnos.as_bytes()).encode(out),
            Self::Rollback(seqno) => frame.with_value(&seqno.0.to_be_bytes()).encode(out),
            Self::Stat(name, value) => frame.with_key(name).with_value(value).encode(out),
            Self::StreamAdded(opaque) => frame.with_extras(&opaque.0.to_be_bytes()).encode(out),
            Self::Written(token) => frame.with_extras(&token.encode()).encode(out),
            Self::ResolvedName(name) => frame.with_extras(&name.encode()).encode(out),
            Self::Document(flags, key, value) => {
                let extras = flags.to_be_bytes();
                frame.with_extras(&extras).with_key(key).with_value(value).encode(out)
            }
            Self::Counter(token, value) => with_token(frame, *token, &value.to_be_bytes(), out),
            Self::MutationResults(results) => with_token(frame, results.token, results.value, out),
            Self::FailoverLog(entries) => {
                let mut value = Vec::new();
                encode_failover_log(*entries, &mut value);
                frame.with_value(&value).encode(out)
            }
            Self::Metadata(metadata) => {
                let mut extras = Vec::with_capacity(21);
                metadata.encode(&mut extras);
                frame.with_extras(&extras).encode(out)
            }
            Self::ObservedSeqno(observed) => {
                let mut value = Vec::with_capacity(43);
                observed.encode(&mut value);
                frame.with_value(&value).encode(out)
            }
        }
    }
}

fn with_token(
    frame: Frame<'_>,
    token: Option<MutationToken>,
    value: &[u8],
    out: &mut impl BufMut,
) -> Result<(), EncodeError> {
    match token {
        None => frame.with_value(value).encode(out),
        Some(token) => frame.with_extras(&token.encode()).with_value(value).encode(out),
    }
}

/// The value; an error if there are extras or a key.
fn only_value<'a>(frame: &Frame<'a>) -> Result<&'a [u8], DecodeError> {
    extras::<0>(frame)?;
    no_key(frame)?;
    Ok(frame.value)
}

fn counter_value(value: &[u8]) -> Result<u64, DecodeError> {
    let bytes = <[u8; 8]>::try_from(value).map_err(|_| DecodeError::InvalidField("counter"))?;
    Ok(u64::from_be_bytes(bytes))
}

const fn is_empty(frame: &Frame<'_>) -> bool {
    frame.extras.is_empty() && frame.key.is_empty() && frame.value.is_empty()
}
