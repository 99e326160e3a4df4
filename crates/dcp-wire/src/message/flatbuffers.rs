//! A minimal FlatBuffers reader and writer for one flat table; reading checks every offset.

/// A table: its vtable locates the fields, and absent fields have their default.
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
        // The vtable is at a signed offset before the table.
        let distance = i32::from_le_bytes(array(buffer, position)?);
        let start = i64::try_from(position).ok()?.checked_sub(i64::from(distance))?;
        let start = usize::try_from(start).ok()?;
        let len = usize::from(u16::from_le_bytes(array(buffer, start)?));
        let vtable = buffer.get(start..start.checked_add(len)?)?;
        Some(Self { buffer, position, vtable })
    }

    /// Position of a field, `None` if it is absent.
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

/// Writes a buffer of one table backwards and with the alignment of the reference library, so that
/// the bytes match those of a server.
///
/// Fields are ordered by decreasing size, then by decreasing number; defaults are omitted.
#[derive(Default)]
pub(super) struct TableWriter {
    /// The buffer in reverse order.
    reversed: Vec<u8>,
    /// End of the table as a distance from the end of the buffer, like all positions here.
    table_end: usize,
    /// Numbers and positions of the fields.
    fields: Vec<(usize, usize)>,
    alignment: usize,
}

#[expect(
    clippy::arithmetic_side_effects,
    reason = "places in a buffer that is in memory, all within what was written"
)]
impl TableWriter {
    /// Begins a table with a string that is one of its fields.
    pub(super) fn with_string(text: &[u8]) -> (Self, StringPlace) {
        let mut writer = Self::default();
        writer.align(4, text.len() + 1);
        writer.reversed.push(0);
        writer.reversed.extend(text.iter().rev());
        let len = u32::try_from(text.len()).unwrap_or(u32::MAX);
        writer.push(len.to_be_bytes());
        writer.table_end = writer.reversed.len();
        let place = StringPlace(writer.table_end);
        (writer, place)
    }

    /// A number; omitted if 0.
    pub(super) fn u64(&mut self, number: usize, value: u64) {
        if value != 0 {
            self.field(number, value.to_be_bytes());
        }
    }

    /// A number; omitted if 0.
    pub(super) fn u32(&mut self, number: usize, value: u32) {
        if value != 0 {
            self.field(number, value.to_be_bytes());
        }
    }

    /// A flag; omitted if false.
    pub(super) fn bool(&mut self, number: usize, value: bool) {
        if value {
            self.field(number, [1]);
        }
    }

    /// The string passed to the constructor.
    pub(super) fn string(&mut self, number: usize, place: StringPlace) {
        self.align(4, 0);
        let distance = self.reversed.len() + 4 - place.0;
        self.field(number, offset(distance));
    }

    fn field<const N: usize>(&mut self, number: usize, reversed: [u8; N]) {
        self.push(reversed);
        self.fields.push((number, self.reversed.len()));
    }

    /// Appends an aligned number.
    fn push<const N: usize>(&mut self, reversed: [u8; N]) {
        self.align(N, 0);
        self.reversed.extend_from_slice(&reversed);
    }

    /// Pads so that the position after `more` further bytes is aligned.
    fn align(&mut self, alignment: usize, more: usize) {
        self.alignment = self.alignment.max(alignment);
        let padded = (self.reversed.len() + more).next_multiple_of(alignment) - more;
        self.reversed.resize(padded, 0);
    }

    /// The finished buffer.
    pub(super) fn finish(mut self) -> Vec<u8> {
        let slots = self.fields.iter().map(|(number, _)| number + 1).max().unwrap_or_default();
        let vtable_len = 4 + 2 * slots;
        // The table begins with the distance to its vtable, which directly precedes it.
        self.push(offset(vtable_len));
        let table = self.reversed.len();
        for number in (0..slots).rev() {
            let place = self.fields.iter().find(|(known, _)| *known == number);
            let at = place.map_or(0, |(_, place)| table - place);
            self.push(short_offset(at));
        }
        let table_len = table - self.table_end;
        self.push(short_offset(table_len));
        self.push(short_offset(vtable_len));
        self.align(self.alignment, 4);
        let root = self.reversed.len() + 4 - table;
        self.push(offset(root));
        self.reversed.reverse();
        self.reversed
    }
}

/// Position of the table's string.
#[derive(Clone, Copy)]
pub(super) struct StringPlace(usize);

/// A distance within the reversed buffer. Names are far too short to overflow it.
fn offset(distance: usize) -> [u8; 4] {
    u32::try_from(distance).unwrap_or(u32::MAX).to_be_bytes()
}

fn short_offset(distance: usize) -> [u8; 2] {
    u16::try_from(distance).unwrap_or(u16::MAX).to_be_bytes()
}
