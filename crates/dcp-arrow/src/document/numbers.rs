//! Numbers in documents, parsed from their JSON text.

/// Parses an integer without fraction and exponent.
pub(super) fn integer(text: &[u8]) -> Option<i64> {
    let (is_negative, digits) = match text.split_first()? {
        (b'-', digits) => (true, digits),
        _ => (false, text),
    };
    if digits.is_empty() {
        return None;
    }
    let mut number: i64 = 0;
    for digit in digits {
        let digit = i64::from(digit.checked_sub(b'0').filter(|digit| *digit <= 9)?);
        // Accumulate negatively: there is one more negative number than positive ones.
        number = number.checked_mul(10)?.checked_sub(digit)?;
    }
    if is_negative { Some(number) } else { number.checked_neg() }
}

/// A JSON number: its digits and the exponent of the last one.
struct Digits<'a> {
    is_negative: bool,
    whole: &'a [u8],
    fraction: &'a [u8],
    exponent: i64,
}

impl<'a> Digits<'a> {
    /// Splits a valid number into its parts.
    fn new(text: &'a [u8]) -> Option<Self> {
        let (is_negative, rest) = match text.split_first()? {
            (b'-', rest) => (true, rest),
            _ => (false, text),
        };
        let (mantissa, exponent) = match rest.iter().position(|byte| matches!(byte, b'e' | b'E')) {
            Some(at) => (rest.get(..at)?, exponent(rest.get(at + 1..)?)?),
            None => (rest, 0),
        };
        let (whole, fraction) = match mantissa.iter().position(|byte| *byte == b'.') {
            Some(at) => (mantissa.get(..at)?, mantissa.get(at + 1..)?),
            None => (mantissa, &[][..]),
        };
        Some(Self { is_negative, whole, fraction, exponent })
    }

    fn iter(&self) -> impl Iterator<Item = u8> {
        self.whole.iter().chain(self.fraction).map(|digit| digit.wrapping_sub(b'0'))
    }

    fn len(&self) -> i64 {
        i64::try_from(self.whole.len() + self.fraction.len()).unwrap_or(i64::MAX)
    }
}

/// An exponent, saturated where a larger one makes no difference.
fn exponent(text: &[u8]) -> Option<i64> {
    const LARGE: i64 = 1_000_000_000_000;
    let (sign, digits) = match text.split_first()? {
        (b'-', digits) => (-1, digits),
        (b'+', digits) => (1, digits),
        _ => (1, text),
    };
    let mut number: i64 = 0;
    for digit in digits {
        number = (number * 10 + i64::from(digit.checked_sub(b'0')?)).min(LARGE);
    }
    Some(sign * number)
}

/// The JSON number `text` in units of 10⁻ˢᶜᵃˡᵉ, rounded half up like Spark; `None` if it has more
/// than `precision` digits then.
pub(super) fn decimal(text: &[u8], precision: u8, scale: u8) -> Option<i128> {
    let digits = Digits::new(text)?;
    if digits.iter().all(|digit| digit == 0) {
        return Some(0);
    }
    let fraction = i64::try_from(digits.fraction.len()).ok()?;
    let shift = digits.exponent - fraction + i64::from(scale);
    // Number of digits to keep; the next one decides the rounding.
    let kept = digits.len() + shift.min(0);
    let limit = 10_i128.checked_pow(u32::from(precision))?;
    let mut number: i128 = 0;
    if kept >= 0 {
        let kept = usize::try_from(kept).ok()?;
        for (index, digit) in digits.iter().enumerate() {
            if index == kept {
                number += i128::from(digit >= 5);
                break;
            }
            let longer = number.checked_mul(10).and_then(|n| n.checked_add(i128::from(digit)));
            number = longer.filter(|number| *number < limit)?;
        }
    }
    for _ in 0..shift.max(0) {
        number = number.checked_mul(10).filter(|number| *number < limit)?;
    }
    (number < limit).then_some(if digits.is_negative { -number } else { number })
}

/// A decimal as written: its digits, their number, and the number of digits after the point. `None`
/// if it has an exponent or more than 38 digits.
pub(super) fn plain_decimal(text: &[u8]) -> Option<(i128, u8, u8)> {
    const MAX_DIGITS: usize = 38;
    if text.iter().any(|byte| matches!(byte, b'e' | b'E')) {
        return None;
    }
    let digits = Digits::new(text)?;
    let scale = u8::try_from(digits.fraction.len()).ok().filter(|scale| *scale <= 38)?;
    let significant = digits.iter().skip_while(|digit| *digit == 0).count();
    if significant > MAX_DIGITS {
        return None;
    }
    let number = digits.iter().fold(0_i128, |number, digit| number * 10 + i128::from(digit));
    let number = if digits.is_negative { -number } else { number };
    Some((number, u8::try_from(significant.max(1)).ok()?, scale))
}

/// The JSON number `text` as [`decimal`] reads it; `None` if it would be rounded.
pub(super) fn exact_decimal(text: &[u8], precision: u8, scale: u8) -> Option<i128> {
    let extent = Extent::of(text)?;
    if extent.fraction_digits > u64::from(scale) {
        return None;
    }
    decimal(text, precision, scale)
}

/// The JSON number `text` as a double whose shortest text is the same number; `None` if there is
/// none.
pub(super) fn exact_double(text: &[u8]) -> Option<f64> {
    /// Decimal digits that every double keeps.
    const KEPT: u64 = 15;
    /// Decimal exponents that no such number exceeds.
    const LARGE: u64 = 290;
    let number: f64 = std::str::from_utf8(text).ok()?.parse().ok()?;
    if !number.is_finite() {
        return None;
    }
    let extent = Extent::of(text)?;
    if extent.significant_digits <= KEPT
        && extent.whole_digits <= LARGE
        && extent.fraction_digits <= LARGE
    {
        return Some(number);
    }
    let shortest = format!("{number:e}");
    (significant(text)? == significant(shortest.as_bytes())?).then_some(number)
}

/// How many digits a number has, without zeros that do not change it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Extent {
    /// Digits before the point.
    pub(super) whole_digits: u64,
    /// Digits after the point.
    pub(super) fraction_digits: u64,
    /// Digits from the first that is not zero to the last.
    significant_digits: u64,
}

impl Extent {
    /// The extent of a JSON number; `None` if it is none.
    pub(super) fn of(text: &[u8]) -> Option<Self> {
        let digits = Digits::new(text)?;
        let Some(first) = digits.iter().position(|digit| digit != 0) else {
            return Some(Self::default());
        };
        let last = digits.iter().enumerate().filter(|(_, digit)| *digit != 0).last()?.0;
        let point = i64::try_from(digits.whole.len()).ok()? + digits.exponent;
        let (first, last) = (i64::try_from(first).ok()?, i64::try_from(last).ok()?);
        let count = |digits: i64| u64::try_from(digits).unwrap_or_default();
        Some(Self {
            whole_digits: count(point - first),
            fraction_digits: count(last + 1 - point),
            significant_digits: count(last + 1 - first),
        })
    }
}

/// A number's sign, its digits without zeros around them, and the exponent of the first.
fn significant(text: &[u8]) -> Option<(bool, Vec<u8>, i64)> {
    let digits = Digits::new(text)?;
    let all: Vec<u8> = digits.iter().collect();
    let Some(first) = all.iter().position(|digit| *digit != 0) else {
        return Some((false, Vec::new(), 0));
    };
    let last = all.iter().rposition(|digit| *digit != 0)?;
    let exponent = i64::try_from(digits.whole.len()).ok()? + digits.exponent;
    let exponent = exponent - i64::try_from(first).ok()?;
    Some((digits.is_negative, all.get(first..=last)?.to_vec(), exponent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn integers_reach_both_ends_of_their_type() {
        for number in [0, 1, -1, 42, i64::MAX, i64::MIN] {
            assert_eq!(integer(number.to_string().as_bytes()), Some(number));
        }
        for text in ["", "-", "9223372036854775808", "-9223372036854775809", "1.0", "1e3", "+1"] {
            assert_eq!(integer(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn decimals_are_rounded_half_up_and_bounded() {
        for (text, precision, scale, expected) in [
            ("12.34", 5, 2, Some(1234)),
            ("-12.345", 5, 2, Some(-1235)),
            ("12.344999", 5, 2, Some(1234)),
            ("999.994", 5, 2, Some(99_999)),
            ("999.995", 5, 2, None),
            ("1e3", 6, 2, Some(100_000)),
            ("1e4", 6, 2, None),
            ("0.005", 5, 2, Some(1)),
            ("0.0049", 5, 2, Some(0)),
            ("5e-3", 5, 2, Some(1)),
            ("4e-3", 5, 2, Some(0)),
            ("9e-4", 5, 2, Some(0)),
            ("0e999999999999999999999", 5, 2, Some(0)),
            ("1e999999999999999999999", 38, 0, None),
            ("1e-999999999999999999999", 38, 0, Some(0)),
            ("99999999999999999999999999999999999999", 38, 0, Some(10_i128.pow(38) - 1)),
            ("100000000000000000000000000000000000000", 38, 0, None),
            // 2 to the power of 128, of which 128 bits are 0.
            ("340282366920938463463374607431768211456", 38, 0, None),
            ("999999999999999999999999999999999999999", 38, 0, None),
            ("99999999999999999999999999999999999999.5", 38, 0, None),
            ("0000", 1, 0, Some(0)),
            ("1.50", 1, 0, Some(2)),
            ("9.5", 1, 0, None),
        ] {
            assert_eq!(decimal(text.as_bytes(), precision, scale), expected, "{text}");
        }
        let long = format!("0.{}1", "0".repeat(100_000));
        assert_eq!(decimal(long.as_bytes(), 38, 38), Some(0));
    }

    #[test]
    fn numbers_are_exact_if_no_digit_is_lost() {
        for (text, double, decimal) in [
            ("0.1", true, Some(10)),
            ("0.10000000000000001", false, None),
            ("9007199254740992", true, Some(900_719_925_474_099_200)),
            ("9007199254740993", false, Some(900_719_925_474_099_300)),
            ("1e300", true, None),
            ("1.50", true, Some(150)),
            ("1.505", true, None),
            ("-0.0", true, Some(0)),
            ("5e-1", true, Some(50)),
            ("123456789012345680", true, Some(12_345_678_901_234_568_000)),
            ("1e400", false, None),
            ("1e-400", false, None),
        ] {
            assert_eq!(exact_double(text.as_bytes()).is_some(), double, "{text}");
            assert_eq!(exact_decimal(text.as_bytes(), 38, 2), decimal, "{text}");
        }
    }

    #[test]
    fn decimal_that_is_plain_keeps_its_digits() {
        for (text, expected) in [
            ("1.50", Some((150, 3, 2))),
            ("-0.001", Some((-1, 1, 3))),
            ("0.0", Some((0, 1, 1))),
            ("9223372036854775808", Some((9_223_372_036_854_775_808, 19, 0))),
            ("1e3", None),
        ] {
            assert_eq!(plain_decimal(text.as_bytes()), expected, "{text}");
        }
        assert_eq!(plain_decimal("1".repeat(39).as_bytes()), None);
        assert_eq!(plain_decimal(format!("0.{}", "0".repeat(39)).as_bytes()), None);
    }
}
