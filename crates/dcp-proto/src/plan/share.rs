//! A limit of seqnos, shared among vBuckets.

/// How much to take of each amount so that the total does not exceed `limit`.
///
/// Shares are in proportion to the amounts, and at least 1 of each that is not 0. If there are more
/// of those than `limit`, `limit` of them get 1, round-robin from the `turn`-th on, so that a limit
/// below the number of vBuckets starves none. The limit is used up if the amounts allow.
pub(super) fn share(amounts: &[u64], limit: u64, turn: u64) -> Vec<u64> {
    let total: u128 = amounts.iter().map(|&amount| u128::from(amount)).sum();
    if total <= u128::from(limit) {
        return amounts.to_vec();
    }
    let wanting: Vec<usize> = (0..amounts.len()).filter(|&n| amounts[n] > 0).collect();
    let mut shares = vec![0; amounts.len()];
    let count = wanting.len() as u64;
    if limit <= count {
        let first = (turn % count.max(1)) as usize;
        for &n in wanting.iter().cycle().skip(first).take(limit as usize) {
            shares[n] = 1;
        }
        return shares;
    }
    // One of each first; the remainder in proportion to what each has beyond that one. Rounding
    // leaves less than one for each, which is distributed from the first on.
    let left = limit - count;
    let beyond = total - u128::from(count);
    let mut given = 0;
    for &n in &wanting {
        let part = u128::from(left) * u128::from(amounts[n] - 1) / beyond;
        shares[n] = 1 + u64::try_from(part).unwrap_or(left);
        given += shares[n];
    }
    for &n in &wanting {
        if given == limit {
            break;
        }
        if shares[n] < amounts[n] {
            shares[n] += 1;
            given += 1;
        }
    }
    shares
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn row_limit_is_used_up_and_never_passed(
            amounts in prop::collection::vec(prop_oneof![Just(0), 1..10_u64, 0..u64::MAX / 8], 1..40),
            limit in prop_oneof![1..100_u64, 1..u64::MAX],
            turn: u64,
        ) {
            let shares = share(&amounts, limit, turn);
            let total: u128 = amounts.iter().map(|&n| u128::from(n)).sum();
            let taken: u128 = shares.iter().map(|&n| u128::from(n)).sum();
            prop_assert_eq!(taken, total.min(u128::from(limit)));
            prop_assert!(shares.iter().zip(&amounts).all(|(share, amount)| share <= amount));
            let wanting = amounts.iter().filter(|&&amount| amount > 0).count() as u64;
            if limit >= wanting {
                prop_assert!(shares.iter().zip(&amounts).all(|(share, amount)| (*share > 0) == (*amount > 0)));
            }
        }
    }

    #[test]
    fn row_limit_is_shared_in_proportion() {
        assert_eq!(share(&[100, 300, 0, 600], 100, 0), [11, 30, 0, 59]);
    }

    #[test]
    fn row_limit_below_the_number_of_ranges_takes_turns() {
        let amounts = [5, 0, 5, 5];
        let shares: Vec<_> = (0..3).map(|turn| share(&amounts, 1, turn)).collect();
        assert_eq!(shares, [[1, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]);
        assert_eq!(share(&amounts, 2, 2), [1, 0, 0, 1]);
    }
}
