//! The partition of a key, as Kafka's own clients choose it.

/// Hash of a key by which the Java client chooses its partition: murmur2 with the sign cleared.
#[must_use]
pub fn murmur2(key: &[u8]) -> u32 {
    const M: u32 = 0x5bd1_e995;
    let (words, rest) = key.as_chunks::<4>();
    // The seed of Kafka. Lengths of keys are far below 2^32.
    let mut hash = 0x9747_b28c ^ u32::try_from(key.len()).unwrap_or(u32::MAX);
    for word in words {
        let mut mixed = u32::from_le_bytes(*word).wrapping_mul(M);
        mixed ^= mixed >> 24;
        hash = hash.wrapping_mul(M) ^ mixed.wrapping_mul(M);
    }
    if !rest.is_empty() {
        for (place, byte) in rest.iter().enumerate() {
            hash ^= u32::from(*byte) << (8 * place);
        }
        hash = hash.wrapping_mul(M);
    }
    hash ^= hash >> 13;
    hash = hash.wrapping_mul(M);
    (hash ^ (hash >> 15)) & 0x7fff_ffff
}

#[cfg(test)]
mod tests {
    use super::murmur2;

    #[test]
    fn hashes_are_those_of_the_java_client() {
        // Of the tests of Kafka's Utils.murmur2, which are signed.
        let known: [(&[u8], i32); 7] = [
            (b"21", -973_932_308),
            (b"foobar", -790_332_482),
            (b"a-little-bit-long-string", -985_981_536),
            (b"a-little-bit-longer-string", -1_486_304_829),
            (b"lkjh234lh9fiuh90y23oiuhsafujhadof229phr9h19h89h8", -58_897_971),
            (b"abc", 479_470_107),
            (b"", 275_646_681),
        ];
        for (key, hash) in known {
            assert_eq!(murmur2(key), hash.cast_unsigned() & 0x7fff_ffff, "{key:?}");
        }
    }
}
