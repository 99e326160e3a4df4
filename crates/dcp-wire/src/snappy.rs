//! Snappy blocks, the encoding of compressed values.

use snap::raw::{Decoder, Encoder, decompress_len};

use crate::{DecodeError, EncodeError};

/// Inflates a value to at most `max` bytes.
///
/// The length a block declares is checked before anything is allocated, so that a small packet
/// cannot claim gigabytes. [`MAX_BODY_LEN`](crate::MAX_BODY_LEN) is a suitable limit.
///
/// # Errors
/// [`DecodeError::Decompress`] for an invalid block or one that would exceed `max`.
pub fn decompress(input: &[u8], max: usize) -> Result<Vec<u8>, DecodeError> {
    let mut out = Vec::new();
    decompress_into(input, max, &mut out)?;
    Ok(out)
}

/// As [`decompress`], into a reused buffer whose contents are replaced.
///
/// # Errors
/// As [`decompress`]; `out` is empty then.
pub fn decompress_into(input: &[u8], max: usize, out: &mut Vec<u8>) -> Result<(), DecodeError> {
    out.clear();
    out.resize(decompressed_len(input, max)?, 0);
    match Decoder::new().decompress(input, out) {
        Ok(len) => {
            out.truncate(len);
            Ok(())
        }
        Err(_) => {
            out.clear();
            Err(DecodeError::Decompress("damaged block"))
        }
    }
}

/// Inflates a value into a slice of exactly [`decompressed_len`] bytes.
///
/// # Errors
/// [`DecodeError::Decompress`] for an invalid block or one of another length; the contents of `out`
/// are unspecified then.
pub fn decompress_exact(input: &[u8], out: &mut [u8]) -> Result<(), DecodeError> {
    match Decoder::new().decompress(input, out) {
        Ok(len) if len == out.len() => Ok(()),
        _ => Err(DecodeError::Decompress("damaged block")),
    }
}

/// The length a block declares, refused if it exceeds `max` or could not come from `input`.
///
/// # Errors
/// [`DecodeError::Decompress`].
pub fn decompressed_len(input: &[u8], max: usize) -> Result<usize, DecodeError> {
    let len = decompress_len(input).map_err(|_| DecodeError::Decompress("damaged length"))?;
    if len > max {
        return Err(DecodeError::Decompress("declared length exceeds the limit"));
    }
    // A copy of up to 64 bytes takes at least 3 bytes. No valid block inflates by more than that,
    // so a few bytes cannot reserve megabytes either.
    if len > input.len().saturating_mul(MAX_RATIO) {
        return Err(DecodeError::Decompress("declared length cannot be reached"));
    }
    Ok(len)
}

/// Maximum ratio of a valid block: a 2-byte copy yields at most 11 bytes, a 3-byte copy 64.
const MAX_RATIO: usize = 22;

/// Compresses a value into one block.
///
/// # Errors
/// [`EncodeError`] if the value is longer than a block can be (4 GiB).
pub fn compress(input: &[u8]) -> Result<Vec<u8>, EncodeError> {
    Encoder::new().compress_vec(input).map_err(|_| EncodeError {
        what: "value to compress",
        len: input.len(),
        max: u32::MAX as usize,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MAX_BODY_LEN;

    #[test]
    fn snappy_length_over_the_limit_is_refused_before_allocation() {
        // Declares 4 GiB - 1 in a handful of bytes.
        let bomb = [0xff, 0xff, 0xff, 0xff, 0x0f, 0x00, 0x61];
        assert_eq!(
            decompress(&bomb, MAX_BODY_LEN),
            Err(DecodeError::Decompress("declared length exceeds the limit"))
        );
        // 16 MiB lies within the limit, but seven bytes cannot hold it.
        let bomb = [0x80, 0x80, 0x80, 0x08, 0x00, 0x61];
        assert_eq!(
            decompress(&bomb, MAX_BODY_LEN),
            Err(DecodeError::Decompress("declared length cannot be reached"))
        );
    }

    #[test]
    fn snappy_block_of_the_longest_run_stays_within_the_ratio() {
        for len in [0, 1, 64, 65_536, 1 << 20, (20 << 20) + 1] {
            let zeros = vec![0; len];
            let block = compress(&zeros).unwrap();
            assert_eq!(decompress(&block, len).unwrap(), zeros);
            if len > 0 {
                assert!(decompress(&block, len - 1).is_err());
            }
        }
    }

    #[test]
    fn snappy_block_that_is_damaged_is_an_error_and_leaves_nothing_behind() {
        let mut block = compress(b"hello hello hello hello hello hello").unwrap();
        block.truncate(block.len() - 1);
        let mut out = b"old".to_vec();
        assert!(decompress_into(&block, 100, &mut out).is_err());
        assert!(out.is_empty());
        assert!(decompress(&[], 100).is_err());
    }
}
