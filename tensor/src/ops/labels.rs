//! Signatures built from the parameters of an op, and checks of these parameters.

use crate::layout::Layout;
use crate::op::DTypes;
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::DType;
use std::borrow::Cow;

/// The maximal number of dims of ops with built signatures.
pub(super) const DIMS_MAX: usize = 12;

const LETTERS: [&str; DIMS_MAX] = ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l"];

/// The label of a dim.
pub(super) fn dim_label(dim: usize) -> &'static str {
    LETTERS[dim]
}

/// The labels of some dims, separated by blanks.
pub(super) fn dim_labels(dims: impl IntoIterator<Item = usize>) -> String {
    dims.into_iter().map(dim_label).collect::<Vec<_>>().join(" ")
}

/// The labels of `ndim` dims with dim `dim` written as `other`; an empty `other` leaves the dim out.
pub(super) fn dim_labels_with(ndim: usize, dim: usize, other: &str) -> String {
    let label = |d| if d == dim { other } else { dim_label(d) };
    (0..ndim).map(label).filter(|l| !l.is_empty()).collect::<Vec<_>>().join(" ")
}

/// The labels of a tensor of `ndim` dims, and of the tensor without some dims (ascending): `..m d` and `d` without leading
/// dims, `..m d` and `..m` without trailing dims, `a b c` and `a c` otherwise.
pub(super) fn full_and_reduced(ndim: usize, dims: &[usize]) -> [String; 2] {
    let count = dims.len();
    let named = |n: usize| (0..n).map(|i| LETTERS[(i + 3) % DIMS_MAX]).collect::<Vec<_>>().join(" ");
    let join = |lead: &str, rest: String| format!("{lead} {rest}").trim().to_string();
    if count > 0 && dims[count - 1] == count - 1 {
        [join("..m", named(ndim - count)), named(ndim - count)]
    } else if count > 0 && dims[0] == ndim - count {
        [join("..m", named(count)), "..m".to_string()]
    } else {
        [dim_labels(0..ndim), dim_labels((0..ndim).filter(|d| !dims.contains(d)))]
    }
}

/// The results of [`reduction`] for leading dims, by the number of dims that are left.
const LEADING: [[&str; 2]; 4] = [
    ["..m -> ", " -> ..m"],
    ["..m d -> d", "d -> ..m d"],
    ["..m d e -> d e", "d e -> ..m d e"],
    ["..m d e f -> d e f", "d e f -> ..m d e f"],
];

/// The results of [`reduction`] for trailing dims, by their number minus one.
const TRAILING: [[&str; 2]; 2] = [["..m d -> ..m", "..m -> ..m d"], ["..m d e -> ..m", "..m -> ..m d e"]];

/// The signature of an op that removes some dims (ascending), and of the op that restores them. The signatures that training steps
/// use are constants, which plans are cached by.
pub(super) fn reduction(ndim: usize, dims: &[usize]) -> [Cow<'static, str>; 2] {
    let count = dims.len();
    let written = match (dims.first(), dims.last()) {
        (_, Some(&last)) if last == count - 1 => LEADING.get(ndim - count),
        (Some(&first), _) if first == ndim - count => TRAILING.get(count - 1),
        _ => None,
    };
    written.map_or_else(|| build_reduction(ndim, dims).map(Cow::Owned), |pair| pair.map(Cow::Borrowed))
}

fn build_reduction(ndim: usize, dims: &[usize]) -> [String; 2] {
    let [full, reduced] = full_and_reduced(ndim, dims);
    [format!("{full} -> {reduced}"), format!("{reduced} -> {full}")]
}

/// The maximal number of tensors of ops that take or give a list of tensors.
pub(crate) const ARGUMENTS_MAX: usize = 16;

/// `[0, 1, .., n - 1]`.
const fn all(n: usize) -> &'static [usize] {
    const ALL: &[usize] = &[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15];
    ALL.split_at(n).0
}

/// [`Op::linear_in`](crate::op::Op::linear_in) of an op that is linear in its `count` arguments jointly.
pub(super) fn linear_jointly(count: usize) -> &'static [&'static [usize]] {
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

/// Refuses a list of tensors that is empty or too long.
pub(super) fn check_num_tensors(name: &str, count: usize) -> Result<()> {
    if (1..=ARGUMENTS_MAX).contains(&count) {
        return Ok(());
    }
    invalid_argument(format!("{name}: {count} tensors, but 1 to {ARGUMENTS_MAX} are supported"))
}

/// The common dtype of all arguments, as the dtype of the one result.
pub(super) fn common_dtype(inputs: &[DType]) -> Result<DTypes> {
    match inputs.iter().find(|d| **d != inputs[0]) {
        None => Ok(inputs[..1].into()),
        Some(other) => {
            Err(Error::new(Kind::DType, format!("the arguments have the dtypes {} and {other}", inputs[0]))
                .detail("help", "cast one of them: x.cast(dtype)"))
        }
    }
}

/// The wanted layout of an output with labels that no argument has: gives them their extents and does not shard them.
pub(super) fn unsplit(like: &Layout, dtype: DType, shape: &[usize]) -> Option<Layout> {
    Some(Layout::invariant(like.mesh(), dtype, shape))
}

/// Refuses more than [`DIMS_MAX`] dims.
pub(super) fn check_ndim(name: &str, ndim: usize) -> Result<()> {
    if ndim <= DIMS_MAX {
        return Ok(());
    }
    Err(Error::new(
        Kind::Shape,
        format!("{name}: a tensor of {ndim} dims, but at most {DIMS_MAX} are supported"),
    )
    .detail("help", "merge neighbouring dims where the tensor is created; reshape has the same limit"))
}

/// Refuses a `dim` that is not in `0..ndim`.
pub(super) fn check_dim(name: &str, ndim: usize, dim: usize) -> Result<()> {
    check_ndim(name, ndim)?;
    if dim >= ndim {
        return invalid_argument(format!(
            "{name}: dim {dim} is out of range for a tensor of {ndim} dims; dims count from 0"
        ));
    }
    Ok(())
}

/// An error of kind `Kind::Shape` about the parameters of an op.
pub(super) fn invalid_argument<T>(why: impl Into<String>) -> Result<T> {
    Err(Error::new(Kind::Shape, why))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::elementwise::Elementwise;
    use crate::methods::shaping::Shaping;
    use crate::methods::value::Value;
    use crate::tensor::Tensor;
    use shardgrad_dist::{Mesh, World};

    #[test]
    fn built_signatures_match_hand_written_ones() {
        assert_eq!(full_and_reduced(3, &[1]), ["a b c", "a c"]);
        assert_eq!(full_and_reduced(3, &[0]), ["..m d e", "d e"]);
        assert_eq!(full_and_reduced(3, &[2]), ["..m d", "..m"]);
        assert_eq!(full_and_reduced(2, &[0, 1]), ["..m", ""]);
        for (ndim, dims) in (0..6).flat_map(|n| (0..1 << n).map(move |set| (n, set))) {
            let dims: Vec<usize> = (0..ndim).filter(|d| dims >> d & 1 == 1).collect();
            assert_eq!(reduction(ndim, &dims), build_reduction(ndim, &dims));
        }
        assert_eq!(dim_labels_with(3, 1, "b!"), "a b! c");
        assert_eq!(dim_labels_with(3, 1, ""), "a c");
        assert!(
            check_dim("op", 2, 2).is_err()
                && check_dim("op", 2, 1).is_ok()
                && check_dim("op", 13, 0).is_err()
        );
    }

    /// An op that fills a part of a tensor with a value.
    type Fill = fn(&Tensor, f64) -> Tensor;

    /// The last element of the result of an op that fills.
    fn filled(op: Fill, dtype: DType, value: f64) -> Result<f64> {
        let result = World::run(Mesh::single(), |rank| {
            let x = Tensor::from_host(rank, &[1], &[0.0])?.cast(dtype);
            op(&x, value).to_f64()
        });
        result.map(|mut ranks| *ranks.remove(0).last().expect("a fill has elements"))
    }

    #[test]
    fn fill_values_that_the_dtype_cannot_represent_are_refused() {
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
                assert_eq!(error.message(), format!("{name}: {dtype} cannot represent {value}"));
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
