//! INCREMENT and DECREMENT.

use bytes::Bytes;
use dcp_wire::message::Counter;
use dcp_wire::{Cas, Datatype, Opcode};

use super::command::Command;
use super::document::split_xattrs;
use super::failure::Failure;
use crate::DocumentError;
use crate::bucket::{Condition, DocumentWrite};

/// Expiry that means: do not create the counter.
const NO_CREATE: u32 = u32::MAX;

impl Command<'_, '_> {
    pub(super) fn count(&mut self) -> Result<(), Failure> {
        let Counter { delta, initial, expiry, .. } = Counter::decode(self.frame)?;
        // Counting never changes a document's expiry, so there is nothing to preserve.
        let durability = self.options()?.durability;
        let increment = self.frame.header.opcode == Opcode::INCREMENT;
        let (key, now, cas) = (self.key()?, self.now, self.frame.header.cas);
        let (written, number) = self.with_vbucket(|vbucket| {
            vbucket.check_collection(key)?;
            vbucket.check_visible(key)?;
            let item = vbucket.live(now, key);
            let (number, section, flags, expiry) = match &item {
                Some(item) => {
                    let (body, section) = split_xattrs(item);
                    let number = parse(&body).ok_or(DocumentError::NotANumber)?;
                    // Increments wrap, decrements stop at 0.
                    let number = if increment {
                        number.wrapping_add(delta)
                    } else {
                        number.saturating_sub(delta)
                    };
                    (number, section, item.flags, item.expiry)
                }
                None if expiry == NO_CREATE || cas != Cas(0) => {
                    return Err(DocumentError::NotFound);
                }
                None => (initial, Bytes::new(), 0, now.absolute_expiry(expiry)),
            };
            let xattr = if section.is_empty() { Datatype::RAW } else { Datatype::XATTR };
            let write = DocumentWrite {
                key,
                value: [section.as_ref(), number.to_string().as_bytes()].concat().into(),
                datatype: Datatype::JSON.with(xattr),
                flags,
                expiry,
                cas,
                condition: Condition::Any,
                durability,
            };
            Ok((vbucket.store(now, write)?, number))
        })??;
        self.send_written_with(written, &number.to_be_bytes())
    }
}

fn parse(body: &[u8]) -> Option<u64> {
    str::from_utf8(body).ok()?.trim().parse().ok()
}
