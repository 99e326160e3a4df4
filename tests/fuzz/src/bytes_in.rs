//! Numbers and parts taken off the front of a target's bytes.

/// The rest of a target's bytes. Beyond their end everything is zero or empty.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BytesIn<'a> {
    rest: &'a [u8],
}

impl<'a> BytesIn<'a> {
    pub(crate) const fn new(rest: &'a [u8]) -> Self {
        Self { rest }
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.rest.is_empty()
    }

    pub(crate) const fn rest(&self) -> &'a [u8] {
        self.rest
    }

    /// So many bytes, or what there is.
    pub(crate) fn take(&mut self, len: usize) -> &'a [u8] {
        let (front, rest) = self.rest.split_at(len.min(self.rest.len()));
        self.rest = rest;
        front
    }

    /// Bytes behind a byte that says how many.
    pub(crate) fn part(&mut self) -> &'a [u8] {
        let len = self.u8();
        self.take(usize::from(len))
    }

    /// Bytes up to the next line feed, which is left out.
    pub(crate) fn line(&mut self) -> &'a [u8] {
        let len = self.rest.iter().position(|&byte| byte == b'\n').unwrap_or(self.rest.len());
        let line = self.take(len);
        self.take(1);
        line
    }

    fn number<const N: usize>(&mut self) -> [u8; N] {
        let mut bytes = [0; N];
        let front = self.take(N);
        bytes[..front.len()].copy_from_slice(front);
        bytes
    }

    pub(crate) fn u8(&mut self) -> u8 {
        u8::from_be_bytes(self.number())
    }

    pub(crate) fn u16(&mut self) -> u16 {
        u16::from_be_bytes(self.number())
    }

    pub(crate) fn u32(&mut self) -> u32 {
        u32::from_be_bytes(self.number())
    }

    pub(crate) fn u64(&mut self) -> u64 {
        u64::from_be_bytes(self.number())
    }

    /// One of `choices`.
    pub(crate) fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[usize::from(self.u8()) % choices.len()]
    }

    /// A seqno: mostly near `around`, sometimes any.
    pub(crate) fn near(&mut self, around: u64) -> u64 {
        match self.u8() {
            // What is far away takes eight more bytes.
            0xff => self.u64(),
            step @ 0xe0.. => around.saturating_sub(u64::from(step - 0xdf)),
            step => around.saturating_add(u64::from(step)),
        }
    }
}
