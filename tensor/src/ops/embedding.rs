//! Rows of a table by index: y_n = row index_n of the table.

use super::{Case, Input};
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::op::{
    CanonicalForm, Cotangents, DTypes, ForwardContext, LocalTensors, Op, SavedForBackward, Vjp, common_float,
    sum_nodes,
};
use shardgrad_dist::{Error, Kind, Result};
use shardgrad_kernels::op::embedding::{BACKWARD, BACKWARD_IN_LEAVES, FORWARD};
use shardgrad_kernels::{DType, Scalar};
use smallvec::SmallVec;
use std::rc::Rc;

/// Embedding lookup: y_n = row index_n of a table; `[v] d, ..m -> ..m d`.
///
/// On a table (any float dtype) and indices (i64, each in 0..v). Linear in the table. The table may be sharded over v
/// (vocabulary-parallel embedding): a rank gives -0 for rows that it does not hold, so the result is a partial sum with one
/// term that counts, and the bits of that term, -0 included.
///
/// Gradient: row i of dtable = the sum of g_n over all n with index_n = i. An index outside of 0..v is an error of kind
/// `Kind::Data`.
#[doc(alias = "take")]
#[derive(Debug)]
pub struct Embedding;

/// Backward of [`Embedding`]: the sum of the cotangents of each row, sharded as the table; `..m, ..m d -> [v] d`.
#[derive(Debug)]
struct EmbeddingBackward;

/// The first row of this rank and the number of all rows.
fn rows(local: &ForwardContext<'_>) -> [Scalar; 2] {
    let (count, range) = local.label("v");
    [Scalar::Int(range.start as i64), Scalar::Int(count as i64)]
}

/// Refuses indices of any dtype but i64.
pub(super) fn check_index(dtype: DType) -> Result<()> {
    if dtype == DType::I64 {
        return Ok(());
    }
    Err(Error::new(Kind::DType, format!("indices must be i64, got {dtype}"))
        .detail("help", "convert them: ids.cast(DType::I64)"))
}

impl Op for Embedding {
    fn name(&self) -> &'static str {
        "embedding"
    }

    fn signature(&self) -> &str {
        "[v] d, ..m -> ..m d"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[0]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[true, false]
    }

    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[1], outputs: &[] }
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        check_index(inputs[1])?;
        Ok(SmallVec::from_slice(&[common_float(&inputs[..1])?]))
    }

    fn estimate_work(&self, _: usize, _: &[&Layout], outputs: &[Layout]) -> usize {
        // Only as many elements of the table are read as the result has.
        outputs[0].numel()
    }

    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Exact
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let x = local.contiguous(x)?;
        local.launch(&FORWARD, &[&x[0], &x[1]], &rows(local))
    }

    fn vjp(&self, cx: &Vjp<'_>) -> Cotangents {
        cx.cotangents(|i| cx.cotangent(i, EmbeddingBackward, &[cx.input(1), &cx.grad(0)]))
    }
}

impl Op for EmbeddingBackward {
    fn name(&self) -> &'static str {
        "embedding_backward"
    }

    fn signature(&self) -> &str {
        "..m, ..m d -> [v] d"
    }

    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[&[1]]
    }

    fn differentiable(&self) -> &'static [bool] {
        &[false, true]
    }

    fn dtypes(&self, inputs: &[DType], _: usize) -> Result<DTypes> {
        Ok(inputs[1..].into())
    }

    /// The kernel joins the leaves of each row that is read: a table for each leaf would be large.
    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::Own
    }

    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors> {
        let Some(tree) = Context::of(local.rank).sum_tree() else {
            let x = local.contiguous(x)?;
            return local.launch(&BACKWARD, &[&x[0], &x[1]], &rows(local));
        };
        let [v_start, v_global] = rows(local);
        let scalars = [v_start, v_global, Scalar::Int(tree.num_leaves() as i64)];
        sum_nodes(self, tree, local, x, |x, leaves| {
            let x = local.contiguous(&x.iter().collect::<SmallVec<[_; 2]>>())?;
            local.launch(&BACKWARD_IN_LEAVES, &[&x[0], leaves, &x[1]], &scalars)
        })
    }
}

pub(super) fn cases() -> Vec<Case> {
    let op = Rc::new(Embedding);
    vec![
        Case::new(op.clone(), vec![Input::real(&[7, 4]), Input::index(&[5], 7)]).exact(),
        Case::new(op.clone(), vec![Input::real(&[7, 3]), Input::index(&[2, 5], 7)]).exact(),
        Case::fixed_shape(op, vec![Input::real(&[3, 2]), Input::index(&[0], 3)]).exact(),
    ]
}

#[cfg(test)]
mod tests {
    use super::EmbeddingBackward;
    use crate::execution::context::Context;
    use crate::layout::Layout;
    use crate::methods::value::Value;
    use crate::op::{OutputOptions, apply_with_options};
    use crate::tensor::Tensor;
    use crate::tensor::redistribute::redistribute_cached;
    use shardgrad_dist::{Mesh, World};
    use shardgrad_kernels::{DType, SumTree};
    use std::panic::Location;

    #[test]
    fn matches_rows_looked_up_by_hand() {
        World::run(Mesh::single(), |rank| {
            let table = Tensor::from_host(rank, &[3, 2], &[1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0])?;
            let index = Tensor::from_host(rank, &[2, 1], &[2i64, 0])?;
            assert_eq!(table.embedding(&index).to_host::<f32>()?, [5.0, 6.0, 1.0, 2.0]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn rows_of_a_sharded_table_keep_their_bits() {
        let table = [0.0, -0.0, 1.0, -0.0, -0.0, 0.0, -2.5, -0.0];
        let bits = |mesh: &str, dtype: DType, tree: Option<SumTree>| {
            let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
                let _tree = Context::of(rank).set_sum_tree(tree);
                let axis = if mesh.is_empty() { "" } else { "@tp" };
                let layout = Layout::parse(&format!("f32[4{axis}, 2]"), rank.mesh())?;
                let table = Tensor::from_global(rank, &layout, &table.map(|x: f64| x as f32))?;
                let index = Tensor::from_host(rank, &[5], &[3i64, 0, 1, 2, 3])?;
                let y = table.into_dtype(dtype)?.embedding(&index);
                let whole = Layout::invariant(rank.mesh(), dtype, &[5, 2]);
                let y = redistribute_cached(&y, &whole, Location::caller())?;
                Ok(y.to_f64()?.iter().map(|y| y.to_bits()).collect::<Vec<_>>())
            });
            ranks.unwrap().swap_remove(0)
        };
        let expected: Vec<u64> = [3, 0, 1, 2, 3]
            .iter()
            .flat_map(|row| [table[2 * row], table[2 * row + 1]])
            .map(f64::to_bits)
            .collect();
        for dtype in [DType::F32, DType::BF16, DType::F16, DType::F64] {
            for mesh in ["", "tp=2", "tp=3", "tp=4"] {
                for tree in [None, Some(SumTree::new(12))] {
                    assert_eq!(bits(mesh, dtype, tree), expected, "{dtype} on {mesh} with {tree:?}");
                }
            }
        }
    }

    /// The bits of the gradient of a table of 7 rows from 3 rows of tokens, sharded over `cp`, or the messages of all ranks.
    fn gradient(mesh: &str, dtype: DType, tokens: usize) -> Result<Vec<u64>, Vec<String>> {
        let ranks = World::run(Mesh::parse(mesh).unwrap(), |rank| {
            let _tree = Context::of(rank).set_sum_tree(Some(SumTree::new(12)));
            let axis = if mesh.is_empty() { "" } else { "@cp" };
            let layout = |text: String| Layout::parse(&text, rank.mesh());
            let index: Vec<i64> = (0..3 * tokens).map(|i| (i * i + i / 5) as i64 % 7).collect();
            let g: Vec<f32> = (0..15 * tokens).map(|i| ((i * 7919) % 1009) as f32 / 37.0 - 13.0).collect();
            let index = Tensor::from_global(rank, &layout(format!("i64[3, {tokens}{axis}]"))?, &index)?;
            let g = Tensor::from_global(rank, &layout(format!("f32[3, {tokens}{axis}, 5]"))?, &g)?;
            let table = Layout::invariant(rank.mesh(), dtype, &[7, 5]);
            let args = [&index, &g.into_dtype(dtype)?];
            let options = OutputOptions { layouts: &[Some(table.clone())], ..OutputOptions::default() };
            let mut outputs = match apply_with_options(&EmbeddingBackward, &args, options, Location::caller())
            {
                Ok(outputs) => outputs,
                Err(error) => return Ok(Err(error.to_string())),
            };
            let found = redistribute_cached(&outputs.remove(0), &table, Location::caller())?;
            Ok(Ok(found.to_f64()?.iter().map(|x| x.to_bits()).collect::<Vec<_>>()))
        });
        let ranks = ranks.unwrap_or_else(|e| panic!("{mesh}: {e}"));
        match ranks.iter().all(Result::is_ok) {
            true => ranks.into_iter().next().expect("a mesh has a rank").map_err(|e| vec![e]),
            false => Err(ranks.into_iter().map(|rank| rank.err().unwrap_or_default()).collect()),
        }
    }

    /// Ranks hold 6, 4, 3, 2 and 1 leaves, one node or two; of 3 tokens some ranks hold none.
    #[test]
    fn gradient_has_the_same_bits_for_every_number_of_ranks_that_share_the_tokens() {
        for dtype in [DType::F32, DType::BF16, DType::F64] {
            for tokens in [3, 17, 101] {
                let alone = gradient("", dtype, tokens);
                for mesh in ["cp=2", "cp=3", "cp=4", "cp=6", "cp=12"] {
                    assert_eq!(gradient(mesh, dtype, tokens), alone, "{tokens} tokens in {dtype} on {mesh}");
                }
            }
        }
    }

    #[test]
    fn ranks_without_tokens_refuse_leaves_that_cannot_be_shared_as_their_peers_do() {
        let errors = gradient("cp=5", DType::F32, 3).unwrap_err();
        assert!(errors.iter().all(|error| error.contains("cannot share")), "{errors:?}");
    }

    #[test]
    fn index_out_of_range_is_an_error_with_index_and_range() {
        let error = World::run(Mesh::single(), |rank| {
            let table = Tensor::from_host(rank, &[3, 2], &[0.0f32; 6])?;
            let _ = table.embedding(&Tensor::from_host(rank, &[2], &[2i64, 3])?);
            Ok(())
        })
        .unwrap_err();
        assert!(error.to_string().contains("index 3 at position 1 is outside of 0..3"), "{error}");
    }
}
