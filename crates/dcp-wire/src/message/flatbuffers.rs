//! Just enough of FlatBuffers to read one flat table; every offset is checked.

/// A table: fields are found through its vtable, absent ones have their default.
#[derive(Clone, Copy)]
pub(super) struct Table<'a> {
    buffer: &'a [u8],
    position: usize,
    vtable: &'a [u8],
}

impl<'a> Table<'a> {
    /// The root table of a buffer.
    pub(super) fn root(buffer: &'a [u8]) -> Option<Self> {
        let position = usize::try_from(u32::from_le_bytes(array(buffer, 0)?)).ok()?;
        // The vtable lies at a signed distance before the table.
        let distance = i32::from_le_bytes(array(buffer, position)?);
        let start = i64::try_from(position).ok()?.checked_sub(i64::from(distance))?;
        let start = usize::try_from(start).ok()?;
        let len = usize::from(u16::from_le_bytes(array(buffer, start)?));
        let vtable = buffer.get(start..start.checked_add(len)?)?;
        Some(Self { buffer, position, vtable })
    }

    /// Where the field with a number lies, `None` if it is absent.
    fn field(&self, number: usize) -> Option<usize> {
        // The vtable begins with two lengths of two bytes.
        let slot = number.checked_add(2)?.checked_mul(2)?;
        match u16::from_le_bytes(array(self.vtable, slot)?) {
            0 => None,
            offset => self.position.checked_add(usize::from(offset)),
        }
    }

    fn scalar<const N: usize>(&self, number: usize) -> Option<[u8; N]> {
        self.field(number).map_or(Some([0; N]), |position| array(self.buffer, position))
    }

    /// A number; `None` if the buffer is damaged.
    pub(super) fn u64(&self, number: usize) -> Option<u64> {
        self.scalar(number).map(u64::from_le_bytes)
    }

    /// A number; `None` if the buffer is damaged.
    pub(super) fn u32(&self, number: usize) -> Option<u32> {
        self.scalar(number).map(u32::from_le_bytes)
    }

    /// A flag; `None` if the buffer is damaged.
    pub(super) fn bool(&self, number: usize) -> Option<bool> {
        self.scalar(number).map(|[byte]| byte != 0)
    }

    /// A string's bytes; `None` if the buffer is damaged.
    pub(super) fn string(&self, number: usize) -> Option<&'a [u8]> {
        let Some(position) = self.field(number) else {
            return Some(&[]);
        };
        let distance = usize::try_from(u32::from_le_bytes(array(self.buffer, position)?)).ok()?;
        let start = position.checked_add(distance)?;
        let len = usize::try_from(u32::from_le_bytes(array(self.buffer, start)?)).ok()?;
        let start = start.checked_add(4)?;
        self.buffer.get(start..start.checked_add(len)?)
    }
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> Option<[u8; N]> {
    bytes.get(at..)?.first_chunk().copied()
}
