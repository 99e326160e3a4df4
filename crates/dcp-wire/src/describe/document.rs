//! Keys and values of documents.

use std::borrow::Cow;

use super::{FieldValue, Fields, Keys};
use crate::{Datatype, DecodeError, DocKey, MAX_BODY_LEN, snappy, xattr};

/// The key, split from its collection id if it has one.
pub(super) fn key<'a>(key: &'a [u8], keys: Keys, fields: &mut Fields<'a>) {
    if keys == Keys::WithCollection {
        match DocKey::decode(key) {
            Ok(DocKey { collection_id, key }) => {
                fields.hex("collection_id", collection_id.0);
                return fields.readable("key", key);
            }
            Err(error) => fields.text("problem", error.to_string()),
        }
    }
    fields.readable("key", key);
}

/// JSON of a response, inflated if it is compressed.
pub(super) fn json<'a>(
    name: &'static str,
    datatype: Datatype,
    bytes: &'a [u8],
    fields: &mut Fields<'a>,
) {
    if !datatype.contains(Datatype::SNAPPY) || bytes.is_empty() {
        return fields.readable(name, bytes);
    }
    match snappy::decompress(bytes, MAX_BODY_LEN) {
        Ok(inflated) => fields.push(name, readable(Cow::Owned(inflated))),
        Err(error) => {
            fields.text("problem", error.to_string());
            fields.readable(name, bytes);
        }
    }
}

/// The value: inflated, and split from its xattrs.
pub(super) fn value<'a>(datatype: Datatype, value: &'a [u8], fields: &mut Fields<'a>) {
    let mut bytes = Cow::Borrowed(value);
    if datatype.contains(Datatype::SNAPPY) && !value.is_empty() {
        match snappy::decompress(value, MAX_BODY_LEN) {
            Ok(inflated) => {
                fields.u64("compressed_length", u64::try_from(value.len()).unwrap_or(u64::MAX));
                bytes = Cow::Owned(inflated);
            }
            // A stream without bodies may keep the bit although the rest is not compressed.
            Err(_) if datatype.contains(Datatype::XATTR) && xattr::split(value).is_ok() => {}
            Err(error) => fields.text("problem", error.to_string()),
        }
    }
    if datatype.contains(Datatype::XATTR) && !bytes.is_empty() {
        match xattrs(&bytes) {
            Ok((xattrs, body)) => {
                fields.push("xattrs", FieldValue::List(xattrs));
                bytes = match bytes {
                    Cow::Borrowed(bytes) => Cow::Borrowed(bytes.get(body..).unwrap_or_default()),
                    Cow::Owned(mut bytes) => Cow::Owned(bytes.split_off(body.min(bytes.len()))),
                };
            }
            Err(error) => fields.text("problem", error.to_string()),
        }
    }
    fields.push("value", readable(bytes));
}

/// The xattrs, and where the body begins.
fn xattrs(value: &[u8]) -> Result<(Vec<FieldValue<'static>>, usize), DecodeError> {
    let (xattrs, body) = xattr::split(value)?;
    let mut list = Vec::new();
    for each in xattrs {
        let each = each?;
        let mut record = Fields::default();
        record.push("name", readable(Cow::Owned(each.name.to_vec())));
        record.push("value", readable(Cow::Owned(each.value.to_vec())));
        list.push(FieldValue::Record(record.0));
    }
    Ok((list, value.len().saturating_sub(body.len())))
}

fn readable(bytes: Cow<'_, [u8]>) -> FieldValue<'_> {
    match bytes {
        Cow::Borrowed(bytes) => FieldValue::readable(bytes),
        Cow::Owned(bytes) => match String::from_utf8(bytes) {
            Ok(text) => FieldValue::Text(Cow::Owned(text)),
            Err(error) => FieldValue::Bytes(Cow::Owned(error.into_bytes())),
        },
    }
}
