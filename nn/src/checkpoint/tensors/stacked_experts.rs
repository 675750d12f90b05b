//! Stacked expert weights: a model has one parameter for the matrices of all experts, files have one tensor per expert. The name of
//! a stack has a `*` in place of the expert index.

use super::safetensors_header::{TensorInfo, TensorSpec};
use std::collections::{BTreeMap, HashMap};

/// The part of tensor names before the expert index.
const EXPERTS_INFIX: &str = ".experts.";

/// The stacks of expert weights whose tensors are all in files.
#[derive(Debug, Default)]
pub(super) struct StackedExperts {
    by_name: HashMap<String, Stack>,
}

#[derive(Debug)]
struct Stack {
    /// The stack as a tensor; its byte range is empty, because the stack is not contiguous in files.
    info: TensorInfo,
    /// The names of its tensors, in the order of experts.
    parts: Vec<String>,
}

/// Returns the name of the stack of a tensor, and the index of the tensor in it.
fn stack_and_index(name: &str) -> Option<(String, usize)> {
    let (before, rest) = name.split_once(EXPERTS_INFIX)?;
    let (number, after) = rest.split_once('.')?;
    // Only the canonical text of a number, not 01.
    let index = number.parse::<usize>().ok().filter(|index| index.to_string() == number)?;
    Some((format!("{before}{EXPERTS_INFIX}*.{after}"), index))
}

/// Returns the name of the tensor at `index` of a stack.
pub(super) fn member_name(stack: &str, index: usize) -> String {
    stack.replacen('*', &index.to_string(), 1)
}

/// Whether a name is the name of a stack.
pub(super) fn is_stacked_name(name: &str) -> bool {
    name.contains(&format!("{EXPERTS_INFIX}*."))
}

impl StackedExperts {
    /// Finds the stacks among tensors: same dtype and shape, indices 0, 1, ... without a gap.
    pub(super) fn of<'a>(tensors: impl Iterator<Item = &'a TensorInfo>) -> StackedExperts {
        let mut found: HashMap<String, BTreeMap<usize, &TensorInfo>> = HashMap::new();
        for tensor in tensors {
            if let Some((stack, index)) = stack_and_index(&tensor.name) {
                found.entry(stack).or_default().insert(index, tensor);
            }
        }
        let by_name = found.into_iter().filter_map(|(name, parts)| {
            let first = parts.values().next()?;
            let is_alike = |(expected, (index, part)): (usize, (&usize, &&TensorInfo))| {
                expected == *index && (part.dtype, &part.shape) == (first.dtype, &first.shape)
            };
            if !parts.iter().enumerate().all(is_alike) {
                return None;
            }
            let shape = [&[parts.len()], &first.shape[..]].concat();
            let info = TensorInfo { name: name.clone(), dtype: first.dtype, shape, bytes: 0..0 };
            Some((name, Stack { info, parts: parts.into_values().map(|part| part.name.clone()).collect() }))
        });
        StackedExperts { by_name: by_name.collect() }
    }

    /// Returns the stack of a name, as a tensor.
    pub(super) fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|stack| &stack.info)
    }

    /// Returns the names of the tensors of a stack, in the order of experts.
    pub(super) fn parts(&self, name: &str) -> Option<&[String]> {
        self.by_name.get(name).map(|stack| &stack.parts[..])
    }

    /// Returns the stack that contains the tensor of a name.
    pub(super) fn stack_containing(&self, name: &str) -> Option<&TensorInfo> {
        self.get(&stack_and_index(name)?.0)
    }
}

/// Replaces each stack of a list by its tensors, as files hold them.
pub(super) fn unstack(entries: &[TensorSpec]) -> Vec<TensorSpec> {
    let each = |(name, dtype, shape): &TensorSpec| match shape.split_first() {
        Some((count, rest)) if is_stacked_name(name) => {
            (0..*count).map(|index| (member_name(name, index), *dtype, rest.to_vec())).collect()
        }
        _ => vec![(name.clone(), *dtype, shape.clone())],
    };
    entries.iter().flat_map(each).collect()
}

#[cfg(test)]
mod tests {
    use super::super::weights::Weights;
    use super::super::weights_writer::WeightsWriter;
    use super::*;
    use crate::checkpoint::atomic::disk::scratch::Scratch;
    use shardgrad_tensor::DType;

    const STACK: &str = "layers.3.experts.*.w.weight";

    fn named(name: &str, shape: &[usize]) -> TensorSpec {
        (name.to_string(), DType::U8, shape.to_vec())
    }

    #[test]
    fn stacks_are_written_as_single_tensors_and_read_as_one() {
        // In one file, and in files that end within a stack.
        for bytes_max in [1000, 13] {
            let scratch = Scratch::new();
            let dir = &scratch.path("");
            let entries = [named("a", &[2]), named(STACK, &[11, 2, 3]), named("b", &[4])];
            let bytes: Vec<u8> = (0..66).collect();
            let mut writer = WeightsWriter::create(dir, None, &entries, bytes_max).unwrap();
            for (name, bytes) in [("a", &[1, 2][..]), (STACK, &bytes), ("b", &[9; 4])] {
                writer.append(name, bytes).unwrap();
            }
            writer.finish().unwrap();
            let weights = Weights::open(dir).unwrap();
            assert_eq!(weights.tensors().count(), 13);
            let tenth = "layers.3.experts.10.w.weight";
            assert_eq!(weights.get(tenth).unwrap().shape, [2, 3]);
            assert_eq!(weights.read(tenth).unwrap(), (60..66).collect::<Vec<u8>>());
            let stack = weights.get(STACK).unwrap();
            assert_eq!((&stack.shape[..], stack.dtype), (&[11, 2, 3][..], DType::U8));
            assert_eq!(weights.stack_containing(tenth), Some(STACK));
            assert_eq!(weights.stack_containing("a"), None);
            assert_eq!(weights.read(STACK).unwrap(), bytes);
            let part = |ranges| weights.read_part(STACK, &[11, 2, 3], ranges).unwrap();
            assert_eq!(part(&[9..11, 1..2, 0..2]), [57, 58, 63, 64]);
            assert_eq!(part(&[4..4, 0..2, 0..3]), [0u8; 0]);
        }
    }

    #[test]
    fn stacks_need_contiguous_indices_and_one_shape() {
        let of = |tensors: &[(&str, [usize; 1])]| {
            let tensors: Vec<TensorInfo> = tensors
                .iter()
                .map(|(name, shape)| TensorInfo {
                    name: name.to_string(),
                    dtype: DType::F32,
                    shape: shape.to_vec(),
                    bytes: 0..0,
                })
                .collect();
            StackedExperts::of(tensors.iter()).get("x.experts.*.w").map(|info| info.shape.clone())
        };
        let [first, second, other] = ["x.experts.0.w", "x.experts.1.w", "x.experts.0.v"];
        assert_eq!(of(&[(second, [3]), (other, [9]), (first, [3])]), Some(vec![2, 3]));
        assert_eq!(of(&[(second, [3])]), None);
        assert_eq!(of(&[(first, [3]), (second, [4])]), None);
        assert_eq!(of(&[(first, [3]), ("x.experts.01.w", [3])]), Some(vec![1, 3]));
        assert_eq!(of(&[("x.experts.a.w", [3]), ("experts.0.w", [3])]), None);
    }
}
