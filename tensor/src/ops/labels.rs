//! Signature texts of ops whose labels depend on their parameters, and checks of such parameters.

use crate::layout::Layout;
use crate::op::DTypes;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::DType;
use std::borrow::Cow;

/// The most dims that ops with built signatures take.
pub(super) const DIMS_MAX: usize = 12;

const LETTERS: [&str; DIMS_MAX] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

/// The label of a dim.
pub(super) fn letter(dim: usize) -> &'static str {
    LETTERS[dim]
}

/// The labels of some dims, side by side.
pub(super) fn letters(dims: impl IntoIterator<Item = usize>) -> String {
    dims.into_iter().map(letter).collect::<Vec<_>>().join(" ")
}

/// The labels of `ndim` dims with one dim written as `other` (nothing: left out).
pub(super) fn letters_with(ndim: usize, dim: usize, other: &str) -> String {
    let label = |d| if d == dim { other } else { letter(d) };
    (0..ndim).map(label).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ")
}

/// A tensor of `ndim` dims, and what is left of it without some dims (ascending): `..m d` and `d` without the
/// leading ones, `..m d` and `..m` without the trailing ones, `a b c` and `a c` otherwise.
pub(super) fn full_and_kept(ndim: usize, dims: &[usize]) -> [String; 2] {
    let count = dims.len();
    let named = |n: usize| (0..n).map(|i| LETTERS[(i + 3) % DIMS_MAX]).collect::<Vec<_>>().join(" ");
    let join = |lead: &str, rest: String| format!("{lead} {rest}").trim().to_string();
    if count > 0 && dims[count - 1] == count - 1 {
        [join("..m", named(ndim - count)), named(ndim - count)]
    } else if count > 0 && dims[0] == ndim - count {
        [join("..m", named(count)), "..m".to_string()]
    } else {
        [letters(0..ndim), letters((0..ndim).filter(|d| !dims.contains(d)))]
    }
}

/// What [`reduction`] gives for leading dims, by how many are left.
const LEADING: [[&str; 2]; 4] = [
    ["..m -> ", " -> ..m"],
    ["..m d -> d", "d -> ..m d"],
    ["..m d e -> d e", "d e -> ..m d e"],
    ["..m d e f -> d e f", "d e f -> ..m d e f"],
];

/// What [`reduction`] gives for trailing dims that leave some, by how many they are but one.
const TRAILING: [[&str; 2]; 2] = [["..m d -> ..m", "..m -> ..m d"], ["..m d e -> ..m", "..m -> ..m d e"]];

/// The signature of an op that takes some dims away (ascending), and that of the one that puts them back. Those of every step
/// are written out above.
pub(super) fn reduction(ndim: usize, dims: &[usize]) -> [Cow<'static, str>; 2] {
    let count = dims.len();
    let written = match (dims.first(), dims.last()) {
        (_, Some(&last)) if last == count - 1 => LEADING.get(ndim - count),
        (Some(&first), _) if first == ndim - count => TRAILING.get(count - 1),
        _ => None,
    };
    written.map_or_else(|| built(ndim, dims).map(Cow::Owned), |pair| pair.map(Cow::Borrowed))
}

fn built(ndim: usize, dims: &[usize]) -> [String; 2] {
    let [full, kept] = full_and_kept(ndim, dims);
    [format!("{full} -> {kept}"), format!("{kept} -> {full}")]
}

/// The most arguments that an op with a list of them takes.
pub(super) const ARGUMENTS_MAX: usize = 16;

/// `[0, 1, .., n - 1]`.
const fn all(n: usize) -> &'static [usize] {
    const ALL: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    ALL.split_at(n).0
}

/// The one group of an op that is linear in its `count` arguments jointly.
pub(super) fn jointly(count: usize) -> &'static [&'static [usize]] {
    static GROUPS: [&[&[usize]]; ARGUMENTS_MAX + 1] = [
        &[all(0)],
        &[all(1)],
        &[all(2)],
        &[all(3)],
        &[all(4)],
        &[all(5)],
        &[all(6)],
        &[all(7)],
        &[all(8)],
        &[all(9)],
        &[all(10)],
        &[all(11)],
        &[all(12)],
        &[all(13)],
        &[all(14)],
        &[all(15)],
        &[all(16)],
    ];
    GROUPS[count]
}

/// Refuses a list of arguments that is empty or too long.
pub(super) fn check_count(name: &str, count: usize) -> Result<()> {
    if (1..=ARGUMENTS_MAX).contains(&count) {
        return Ok(());
    }
    misuse(format!("{name}: {count} tensors; between 1 and {ARGUMENTS_MAX} are possible"))
}

/// The dtype of the one result of arguments that all have it.
pub(super) fn one_dtype(inputs: &[DType]) -> Result<DTypes> {
    match inputs.iter().find(|d| **d != inputs[0]) {
        None => Ok(inputs[..1].into()),
        Some(other) => Err(Error::new(Kind::DType, format!("arguments of {} and {other}", inputs[0]))),
    }
}

/// The layout that gives labels without argument their extents and leaves them whole.
pub(super) fn whole(like: &Layout, dtype: DType, shape: &[usize]) -> Option<Layout> {
    Some(Layout::invariant(like.mesh(), dtype, shape))
}

/// Refuses more dims than there are labels.
pub(super) fn check_ndim(name: &str, ndim: usize) -> Result<()> {
    if ndim <= DIMS_MAX {
        return Ok(());
    }
    Err(Error::new(Kind::Shape, format!("{name}: a tensor of {ndim} dims; at most {DIMS_MAX} are possible"))
        .detail("help", "bring neighbouring dims together where the tensor is made"))
}

/// Refuses what is no dim of a tensor.
pub(super) fn check_dim(name: &str, ndim: usize, dim: usize) -> Result<()> {
    check_ndim(name, ndim)?;
    if dim >= ndim {
        return misuse(format!("{name}: there is no dim {dim} in a tensor of {ndim} dims"));
    }
    Ok(())
}

/// Parameters of an op that fit no tensor.
pub(super) fn misuse<T>(why: impl Into<String>) -> Result<T> {
    Err(Error::new(Kind::Shape, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elementwise::Elementwise;
    use crate::shaping::Shaping;
    use crate::tensor::Tensor;
    use crate::value::Value;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn texts_by_hand() {
        assert_eq!(full_and_kept(3, &[1]), ["a b c", "a c"]);
        assert_eq!(full_and_kept(3, &[0]), ["..m d e", "d e"]);
        assert_eq!(full_and_kept(3, &[2]), ["..m d", "..m"]);
        assert_eq!(full_and_kept(2, &[0, 1]), ["..m", ""]);
        for (ndim, dims) in (0..6).flat_map(|n| (0..1 << n).map(move |set| (n, set))) {
            let dims: Vec<usize> = (0..ndim).filter(|d| dims >> d & 1 == 1).collect();
            assert_eq!(reduction(ndim, &dims), built(ndim, &dims));
        }
        assert_eq!(letters_with(3, 1, "b!"), "a b! c");
        assert_eq!(letters_with(3, 1, ""), "a c");
        assert!(
            check_dim("op", 2, 2).is_err()
                && check_dim("op", 2, 1).is_ok()
                && check_dim("op", 13, 0).is_err()
        );
    }

    /// An op that fills a tensor up with a value.
    type Fill = fn(&Tensor, f64) -> Tensor;

    /// The last element of what an op has filled up.
    fn filled(op: Fill, dtype: DType, value: f64) -> Result<f64> {
        let made = World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1], &[0.0])?.cast(dtype);
            op(&x, value).to_f64()
        });
        made.map(|mut ranks| *ranks.remove(0).last().expect("there is one"))
    }

    #[test]
    fn a_value_that_the_dtype_does_not_hold_is_refused() {
        let ops: [(&str, Fill); 2] = [
            ("masked_fill", |x, value| x.masked_fill(&x.eq_scalar(0.0), value)),
            ("pad", |x, value| x.pad_with(0, 0, 1, value)),
        ];
        for (name, op) in ops {
            for (dtype, value) in [
                (DType::U8, -1.0),
                (DType::U8, 256.0),
                (DType::I64, 0.5),
                (DType::I64, f64::NAN),
                (DType::I64, f64::INFINITY),
                (DType::I64, 2f64.powi(63)),
                (DType::Bool, 2.0),
            ] {
                let error = filled(op, dtype, value).unwrap_err();
                assert_eq!(error.kind(), Kind::DType, "{error}");
                assert_eq!(error.message(), format!("{name}: {dtype} holds no {value}"));
                assert!(error.details().iter().any(|d| d.0 == "help") && error.site().is_some(), "{error}");
            }
            for (dtype, value) in
                [(DType::U8, 255.0), (DType::I64, -2f64.powi(63)), (DType::Bool, 1.0), (DType::F32, 0.5)]
            {
                assert_eq!(filled(op, dtype, value).unwrap(), value, "{name}, {dtype}");
            }
            assert_eq!(filled(op, DType::BF16, f64::NEG_INFINITY).unwrap(), f64::NEG_INFINITY);
            assert_eq!(filled(op, DType::BF16, 1.0 + 2f64.powi(-20)).unwrap(), 1.0, "floats round");
        }
    }
}
