//! Limits of a batch's size.

/// Maximum size of one batch, above which its sink refuses more.
///
/// These limits of the sink itself protect against overflowing 32-bit offsets or memory; in normal
/// operation the consumer decides when to cut a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BatchLimits {
    /// Number of rows to reserve room for when a batch begins.
    pub expected_rows: usize,
    /// Number of bytes of values to reserve room for when a batch begins.
    pub expected_bytes: usize,
    /// Maximum size of one column of values in bytes, inflated.
    ///
    /// A batch cut at 16 MiB still includes the row that crosses the limit, of up to 30 MiB.
    pub max_column_bytes: usize,
    /// Maximum size of an inflated value in bytes.
    pub max_value_bytes: usize,
}

impl BatchLimits {
    /// Maximum size of a column with Arrow's 32-bit offsets, in bytes.
    pub const OFFSET_LIMIT: usize = i32::MAX as usize;

    /// Minimum numbers of rows and bytes to reserve room for.
    const LEAST_ROWS: usize = 64;
    const LEAST_BYTES: usize = 16 * 1024;

    /// Sizes the next batch like one of `rows` rows and `bytes` bytes of values, but at least half
    /// of the previous estimate: a column that grows while it is filled is copied.
    pub(crate) fn expect_like(&mut self, rows: usize, bytes: usize) {
        self.expected_rows = rows.max(self.expected_rows / 2).max(Self::LEAST_ROWS);
        // Few distinct sizes, so that the pool's blocks fit.
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
