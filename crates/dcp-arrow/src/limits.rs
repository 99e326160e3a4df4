//! How large a batch may grow.

/// How large one batch may grow before its sink refuses more.
///
/// These are the sink's own bounds, against running out of 32-bit offsets or memory; when a batch
/// is cut in normal operation is the consumer's decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchLimits {
    /// Rows to reserve room for when a batch begins.
    pub expected_rows: usize,
    /// Bytes of values to reserve room for when a batch begins.
    pub expected_bytes: usize,
    /// Largest number of bytes in one column of values, inflated.
    ///
    /// A batch cut at 16 MiB still takes the one row that crosses the line, of up to 30 MiB.
    pub max_column_bytes: usize,
    /// Largest inflated value in bytes.
    pub max_value_bytes: usize,
}

impl BatchLimits {
    /// Most bytes a column can hold with Arrow's 32-bit offsets.
    pub const OFFSET_LIMIT: usize = i32::MAX as usize;

    /// Rows and bytes room is reserved for at least.
    const LEAST_ROWS: usize = 64;
    const LEAST_BYTES: usize = 16 * 1024;

    /// Expects the next batch to be like one of so many rows and bytes of values, or half as large
    /// as was expected of that one: a column that grows while it is filled is copied.
    pub(crate) fn expect_like(&mut self, rows: usize, bytes: usize) {
        self.expected_rows = rows.max(self.expected_rows / 2).max(Self::LEAST_ROWS);
        // In few sizes, so that the pool's blocks fit.
        let bytes = bytes.max(self.expected_bytes / 2).max(Self::LEAST_BYTES);
        self.expected_bytes = bytes.next_power_of_two().min(self.max_column_bytes);
    }
}

impl Default for BatchLimits {
    fn default() -> Self {
        Self {
            expected_rows: 4096,
            expected_bytes: 1024 * 1024,
            max_column_bytes: 128 * 1024 * 1024,
            max_value_bytes: dcp_wire::MAX_BODY_LEN,
        }
    }
}
