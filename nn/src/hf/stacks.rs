//! Tensors that a model holds as one stack and files hold one by one: the matrices of experts. The name of a stack has a `*` where
//! those of its tensors have their number.

use super::header::TensorInfo;
use shardgrad_tensor::DType;
use std::collections::{BTreeMap, HashMap};

/// Name, dtype and shape of a tensor.
type Entry = (String, DType, Vec<usize>);

/// What stands before the number in names of files.
const BEFORE: &str = ".experts.";

/// The stacks of which files hold all tensors.
#[derive(Debug, Default)]
pub(super) struct Stacks {
    by_name: HashMap<String, Stack>,
}

#[derive(Debug)]
struct Stack {
    /// As if files held it: its bytes lie nowhere.
    info: TensorInfo,
    /// The names of its tensors, in order.
    parts: Vec<String>,
}

/// The name of the stack of a tensor of this name, and its number there.
fn place(name: &str) -> Option<(String, usize)> {
    let (before, rest) = name.split_once(BEFORE)?;
    let (number, after) = rest.split_once('.')?;
    // No other text of the same number, such as 01.
    let place = number.parse::<usize>().ok().filter(|place| place.to_string() == number)?;
    Some((format!("{before}{BEFORE}*.{after}"), place))
}

/// The name of a tensor of a stack.
pub(super) fn part(stack: &str, place: usize) -> String {
    stack.replacen('*', &place.to_string(), 1)
}

/// Whether a name is that of a stack.
pub(super) fn is_stack(name: &str) -> bool {
    name.contains(&format!("{BEFORE}*."))
}

impl Stacks {
    /// Of tensors of one dtype and shape whose numbers are 0, 1 and so on without a gap.
    pub(super) fn of<'a>(tensors: impl Iterator<Item = &'a TensorInfo>) -> Stacks {
        let mut found: HashMap<String, BTreeMap<usize, &TensorInfo>> = HashMap::new();
        for tensor in tensors {
            if let Some((stack, place)) = place(&tensor.name) {
                found.entry(stack).or_default().insert(place, tensor);
            }
        }
        let by_name = found.into_iter().filter_map(|(name, parts)| {
            let first = parts.values().next()?;
            let is_alike = |(at, (place, part)): (usize, (&usize, &&TensorInfo))| {
                at == *place && (part.dtype, &part.shape) == (first.dtype, &first.shape)
            };
            if !parts.iter().enumerate().all(is_alike) {
                return None;
            }
            let shape = [&[parts.len()], &first.shape[..]].concat();
            let info = TensorInfo { name: name.clone(), dtype: first.dtype, shape, bytes: 0..0 };
            Some((name, Stack { info, parts: parts.into_values().map(|part| part.name.clone()).collect() }))
        });
        Stacks { by_name: by_name.collect() }
    }

    /// The stack of a name, as a tensor.
    pub(super) fn get(&self, name: &str) -> Option<&TensorInfo> {
        self.by_name.get(name).map(|stack| &stack.info)
    }

    /// The names of the tensors of a stack, in order.
    pub(super) fn parts(&self, name: &str) -> Option<&[String]> {
        self.by_name.get(name).map(|stack| &stack.parts[..])
    }

    /// The stack that the tensor of a name belongs to.
    pub(super) fn around(&self, name: &str) -> Option<&TensorInfo> {
        self.get(&place(name)?.0)
    }
}

/// The tensors of a list as files hold them: of a stack each one.
pub(super) fn apart(entries: &[Entry]) -> Vec<Entry> {
    let each = |(name, dtype, shape): &Entry| match shape.split_first() {
        Some((count, rest)) if is_stack(name) => {
            (0..*count).map(|place| (part(name, place), *dtype, rest.to_vec())).collect()
        }
        _ => vec![(name.clone(), *dtype, shape.clone())],
    };
    entries.iter().flat_map(each).collect()
}

#[cfg(test)]
mod tests {
    use super::super::disk::scratch::Scratch;
    use super::super::folder::Weights;
    use super::super::shards::WeightsWriter;
    use super::*;

    const STACK: &str = "layers.3.experts.*.w.weight";

    fn named(name: &str, shape: &[usize]) -> Entry {
        (name.to_string(), DType::U8, shape.to_vec())
    }

    #[test]
    fn stacks_are_written_one_by_one_and_read_as_one() {
        // In one file, and in files that end amid a stack.
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
            assert_eq!(weights.stack_around(tenth), Some(STACK));
            assert_eq!(weights.stack_around("a"), None);
            assert_eq!(weights.read(STACK).unwrap(), bytes);
            let part = |ranges| weights.read_part(STACK, &[11, 2, 3], ranges).unwrap();
            assert_eq!(part(&[9..11, 1..2, 0..2]), [57, 58, 63, 64]);
            assert_eq!(part(&[4..4, 0..2, 0..3]), [0u8; 0]);
        }
    }

    #[test]
    fn a_stack_has_no_gap_and_one_shape() {
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
            Stacks::of(tensors.iter()).get("x.experts.*.w").map(|info| info.shape.clone())
        };
        let [first, second, other] = ["x.experts.0.w", "x.experts.1.w", "x.experts.0.v"];
        assert_eq!(of(&[(second, [3]), (other, [9]), (first, [3])]), Some(vec![2, 3]));
        assert_eq!(of(&[(second, [3])]), None);
        assert_eq!(of(&[(first, [3]), (second, [4])]), None);
        assert_eq!(of(&[(first, [3]), ("x.experts.01.w", [3])]), Some(vec![1, 3]));
        assert_eq!(of(&[("x.experts.a.w", [3]), ("experts.0.w", [3])]), None);
    }
}
