//! The [`Op`] trait and its application: infer layouts or refuse, redistribute arguments implicitly, run the op on local tensors.

mod grad_accumulator;
mod forward_context;
mod error_text;
mod validation;
mod canonical_sum;
mod plan;
mod decomposition;
mod apply;

use crate::execution::context::Context;
use crate::execution::inference_cache::InferenceKey;
use crate::execution::local_tensor::LocalTensor;
pub use crate::execution::plan_cache::PlanKey;
use crate::layout::Layout;
use crate::layout::infer::Inference;
use crate::layout::refusal::Refusal;
use crate::tensor::Tensor;
pub use apply::{OpHandle, apply, meta, run};
pub(crate) use apply::{OutputOptions, apply_first, apply_with_options};
pub use canonical_sum::{CanonicalForm, LeafCut, NodeLeaves};
pub(crate) use canonical_sum::{refuse_order_of_ranks, sum_leaves, sum_nodes, sum_ranges, unsupported_sum};
pub use decomposition::{Decomposition, Operand, Point, decomposition};
pub use error_text::suggested_repairs;
pub use forward_context::ForwardContext;
pub use grad_accumulator::GradAccumulator;
pub use plan::plan;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::DType;
use smallvec::SmallVec;
use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::rc::Rc;
pub use validation::{check_cotangent_layouts, check_cotangents_present};
use validation::{get_or_raise, not_saved};

/// Local outputs of a forward: the visible outputs, then the outputs saved for backward.
pub type LocalTensors = SmallVec<[LocalTensor; 1]>;
/// The cotangent of each argument; `None` where it was not requested.
pub type Cotangents = SmallVec<[Option<Tensor>; 4]>;
/// Layouts that outputs are to have; `None` where the signature gives one.
pub type OutputLayouts = SmallVec<[Option<Layout>; 2]>;
/// Dtypes of all outputs, including outputs saved for backward.
pub type DTypes = SmallVec<[DType; 4]>;

/// An operation on tensors: signature, dtypes, layout rule, forward and vjp.
///
/// Everything else (planning, redistribution, autograd, tests on all layouts, the op table) is derived from these methods.
#[doc(alias = "autograd.Function")]
#[doc(alias = "custom_vjp")]
#[doc(alias = "Primitive")]
pub trait Op: fmt::Debug + 'static {
    /// The name in errors, traces and the op table.
    fn name(&self) -> &'static str;

    /// Index signature (see [`Signature`](crate::layout::signature::Signature)). Outputs that are only saved for backward come last.
    fn signature(&self) -> &str;

    /// The key under which plans of this op are cached: its type and signature, if dtypes and layouts of the outputs depend on
    /// nothing else but the arguments; `None` to disable the cache.
    ///
    /// The default gives a key for types without fields. An op with fields that do not influence dtypes and layouts may override it.
    fn plan_key(&self) -> Option<PlanKey> {
        PlanKey::of_unit(self, self.signature())
    }

    /// Groups of arguments in which the op is jointly linear while the other arguments are constant: there partial sums stay partial.
    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[]
    }

    /// Whether each argument has a cotangent; `true` for arguments beyond the end of the slice.
    fn differentiable(&self) -> &'static [bool] {
        &[]
    }

    /// The number of trailing outputs that are saved for backward and hidden from the user.
    fn num_saved(&self) -> usize {
        0
    }

    /// The arguments and outputs (including saved ones) that the vjp reads.
    fn saved_for_backward(&self) -> SavedForBackward {
        SavedForBackward { inputs: &[], outputs: &[] }
    }

    /// Dtypes of the outputs. The default requires one float dtype of all arguments and gives it to all outputs.
    ///
    /// # Errors
    /// `Kind::DType` if the dtypes of the arguments are not supported.
    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        let mut outputs = DTypes::new();
        (0..num_outputs).for_each(|_| outputs.push(dtype));
        Ok(outputs)
    }

    /// The layouts of the outputs where the caller states none, for extents that the signature does not give. Empty, the default, where
    /// the signature gives them.
    fn default_outputs(&self, args: &[&Layout], dtypes: &[DType]) -> OutputLayouts {
        let _ = (args, dtypes);
        OutputLayouts::new()
    }

    /// The inference of the signature, as an op changes it whose forward exchanges between ranks itself. The default changes nothing.
    fn adjust_inference(&self, inferred: Rc<Inference>, args: &[&Layout]) -> Rc<Inference> {
        let _ = args;
        inferred
    }

    /// The implicit redistribution steps and the output layouts. The default derives them from the signature, with
    /// [`Op::default_outputs`] and [`Op::adjust_inference`].
    ///
    /// # Errors
    /// A refusal with the reason.
    fn infer(
        &self,
        context: &Context,
        args: &[&Layout],
        dtypes: &[DType],
        want: &[Option<Layout>],
    ) -> Result<Rc<Inference>, Refusal> {
        let own;
        let want = match want.is_empty() {
            true => {
                own = self.default_outputs(args, dtypes);
                &own
            }
            false => want,
        };
        Ok(self.adjust_inference(infer_by_signature(self, context, args, dtypes, want)?, args))
    }

    /// The simpler ops that compute this op on arguments of some layouts; `None`, the default, if the kernel of the op does. `points`
    /// states for each [`Point`] of the call whether values pass the point unchanged.
    ///
    /// A fused op is decomposed where a sum must be completed between its parts, where a point changes a value between its parts, or
    /// where the fusion would change the layouts of gradients. It decides by layouts and points alone.
    fn decompose(&self, args: &[&Layout], points: &[bool]) -> Option<Decomposition> {
        let _ = (args, points);
        None
    }

    /// The simpler ops that compute this op where sums are canonical ([`CanonicalForm`]); by default those of [`Op::decompose`]. An op
    /// that is decomposed on some layouts is decomposed on all of them here, unless its kernel has the bits of the decomposition.
    fn decompose_canonical(&self, args: &[&Layout], points: &[bool]) -> Option<Decomposition> {
        self.decompose(args, points)
    }

    /// How the op sums where the bits of sums must not depend on the mesh. The default states no form.
    fn canonical_form(&self) -> CanonicalForm {
        CanonicalForm::None
    }

    /// [`Op::forward`] with the sums over all leaves of a label that this rank holds, those of a node ([`CanonicalForm::Leaves`]), with the
    /// bits of `forward` on each leaf and of additions in the tree, each rounded; `None`, the default, to compute just that. Some leaf has
    /// an element.
    fn forward_of_leaves(
        &self,
        local: &ForwardContext<'_>,
        x: &[&LocalTensor],
        cut: &LeafCut,
    ) -> Option<Result<LocalTensors>> {
        let _ = (local, x, cut);
        None
    }

    /// The same op with the random numbers of another training step, for a batch that begins at row `first_row` of the global batch;
    /// `None` for ops without random numbers or with constant ones. Replay of a recorded program calls it.
    fn reseed(&self, step: u64, first_row: u64) -> Option<Rc<dyn Op>> {
        let _ = (step, first_row);
        None
    }

    /// An estimate of the work of a forward: multiply-adds of a product, otherwise the elements of the largest tensor (the default).
    ///
    /// `outputs` are the visible outputs. `iteration_space` is the number of index tuples of the signature, which is the work of a
    /// matrix product.
    fn estimate_work(&self, iteration_space: usize, args: &[&Layout], outputs: &[Layout]) -> usize {
        let _ = iteration_space;
        args.iter().copied().chain(outputs).map(Layout::numel).max().unwrap_or(0)
    }

    /// Whether the backward pass runs the op again rather than let other ops keep its output, which is larger than its argument.
    fn is_regathered(&self) -> bool {
        false
    }

    /// The saved argument whose memory the vjp may overwrite if nothing else holds it (buffer donation), for [`Vjp::take_donated`].
    ///
    /// Only for an op that is differentiable in this argument alone, so that its vjp is the last reader.
    fn donated_input(&self) -> Option<usize> {
        None
    }

    /// Whether the vjp can add its cotangents to gradients that other uses of the arguments gave ([`Vjp::accumulator`]).
    fn accumulates_in_place(&self) -> bool {
        false
    }

    /// Whether a cotangent and the accumulator that it is added to are rounded once, so that the bits of 16-bit floats depend on the
    /// accumulator. The tape then gives accumulators under anomaly detection too, which otherwise inspects each cotangent by itself.
    fn rounds_sums_once(&self) -> bool {
        false
    }

    /// Computes the local outputs of this rank from the local arguments.
    ///
    /// Only ops that exchange by a rule of their own communicate with other ranks, and their files are listed in a test.
    ///
    /// # Errors
    /// The errors of kernels.
    fn forward(&self, local: &ForwardContext<'_>, x: &[&LocalTensor]) -> Result<LocalTensors>;

    /// The values that the vjp reads if only the cotangents of the arguments in the mask are ever requested: a product with a frozen
    /// weight need not save its other argument.
    fn saved_for_backward_of(&self, needs_input_grad: &[bool]) -> SavedForBackward {
        let _ = needs_input_grad;
        self.saved_for_backward()
    }

    /// The vector-Jacobian product (backward): cotangents of the requested arguments from the cotangents of the outputs.
    ///
    /// Each has the dual layout of its argument ([`Vjp::cotangent_layout`]); a partial cotangent of a 16-bit argument may be in the
    /// accumulator dtype ([`check_cotangent_layouts`]). A vjp must not communicate: ops in it that imply a redistribution step are
    /// refused.
    ///
    /// # Panics
    /// The default unwinds with `Kind::Unsupported`: an op without differentiable arguments has no vjp.
    fn vjp(&self, _: &Vjp<'_>) -> Cotangents {
        Error::new(Kind::Unsupported, format!("{} has no vjp", self.name()))
            .detail(
                "help",
                "implement Op::vjp, or declare the arguments not differentiable in Op::differentiable",
            )
            .raise()
    }
}

/// Infers steps and output layouts from the signature of an op alone; results are cached.
///
/// # Errors
/// A refusal with the reason.
pub fn infer_by_signature<O: Op + ?Sized>(
    op: &O,
    context: &Context,
    args: &[&Layout],
    dtypes: &[DType],
    want: &[Option<Layout>],
) -> Result<Rc<Inference>, Refusal> {
    let signature = context.signature(op.signature());
    // Where sums are canonical, the leaves of all ranks are joined before a sum is computed with.
    let completes = context.sum_tree().is_some() && !op.canonical_form().takes_partial_sums();
    let key = InferenceKey {
        signature: &signature,
        linear_in: if completes { &[] } else { op.linear_in() },
        differentiable: op.differentiable(),
        args,
        out_dtypes: dtypes,
        want,
    };
    context.inferences.get_or_infer(&key)
}

/// Whether each argument is a float that the op is differentiable in.
pub fn differentiable_args<O: Op + ?Sized>(op: &O, args: &[&Layout]) -> SmallVec<[bool; 6]> {
    let declared = op.differentiable();
    args.iter()
        .enumerate()
        .map(|(i, l)| declared.get(i).copied().unwrap_or(true) && l.dtype().is_float())
        .collect()
}

/// The values that a vjp reads; the tape keeps no other values alive.
#[doc(alias = "save_for_backward")]
#[doc(alias = "residuals")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SavedForBackward {
    /// Indices of arguments.
    pub inputs: &'static [usize],
    /// Indices of outputs.
    pub outputs: &'static [usize],
}

impl SavedForBackward {
    /// The values of an op that is linear in each of its first two arguments: the cotangent of each reads the other.
    #[must_use]
    pub fn for_product(needs_input_grad: &[bool]) -> SavedForBackward {
        let inputs: &[usize] = match needs_input_grad {
            all if !all.contains(&true) => &[],
            [true, rest @ ..] if !rest.contains(&true) => &[1],
            [false, ..] => &[0],
            _ => &[0, 1],
        };
        SavedForBackward { inputs, outputs: &[] }
    }
}

/// The common float dtype of all arguments.
///
/// # Errors
/// `Kind::DType` if an argument is not a float, or two dtypes differ.
pub fn common_float(inputs: &[DType]) -> Result<DType> {
    if let Some(i) = inputs.iter().position(|d| !d.is_float()) {
        return Err(Error::new(
            Kind::DType,
            format!("argument {i} has the dtype {}, but must be a float", inputs[i]),
        )
        .detail("help", "cast it: x.cast(DType::F32)"));
    }
    let first =
        *inputs.first().ok_or_else(|| Error::new(Kind::DType, "needs at least one float argument"))?;
    match inputs.iter().find(|d| **d != first) {
        None => Ok(first),
        Some(other) => {
            Err(Error::new(Kind::DType, format!("the arguments have the dtypes {first} and {other}"))
                .detail("help", "cast one of them: x.cast(DType::F32)"))
        }
    }
}

/// The arguments of [`Op::vjp`]: saved values, layouts, cotangents of the outputs, and which cotangents are requested.
#[doc(alias = "ctx")]
#[derive(Debug)]
pub struct Vjp<'a> {
    /// The rank that runs the vjp.
    pub rank: &'a Rank,
    /// The arguments that [`Op::saved_for_backward`] names; `None` for the others.
    pub inputs: &'a [Option<Tensor>],
    /// The outputs that [`Op::saved_for_backward`] names; `None` for the others.
    pub outputs: &'a [Option<Tensor>],
    /// Layouts of all arguments, after the implicit redistribution steps.
    pub input_layouts: &'a [Layout],
    /// Layouts of all outputs.
    pub output_layouts: &'a [Layout],
    /// Cotangents of the outputs; `None` for an output that nothing used.
    pub grads: &'a [Option<Tensor>],
    /// Whether the cotangent of each argument is requested.
    pub needs_input_grad: &'a [bool],
    /// The argument that [`Op::donated_input`] names, which is then absent from `inputs`; `None` if `inputs` holds it.
    pub donated: RefCell<Option<Tensor>>,
    /// For each argument the sum of the gradients that its other uses gave, if [`Op::accumulates_in_place`]; none beyond the end. See
    /// [`Vjp::accumulator`].
    pub accumulators: &'a [GradAccumulator],
}

impl Vjp<'_> {
    /// Argument `i`, which must be saved for backward.
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` if argument `i` is not saved or does not exist; so do the methods below.
    #[must_use]
    pub fn input(&self, i: usize) -> &Tensor {
        get_or_raise(self.inputs, i, "argument").as_ref().unwrap_or_else(|| not_saved("argument", i).raise())
    }

    /// Takes the argument that [`Op::donated_input`] names, to overwrite its memory if nothing else holds it.
    #[must_use]
    pub fn take_donated(&self, i: usize) -> Tensor {
        self.donated.take().unwrap_or_else(|| self.input(i).clone())
    }

    /// The sum of the gradients that other uses of argument `i` gave, for [`Vjp::apply`]: if the op takes the sum, its result, the
    /// cotangent that the vjp returns, includes the sum.
    #[must_use]
    pub fn accumulator(&self, i: usize) -> Option<&GradAccumulator> {
        self.accumulators.get(i)
    }

    /// Output `i`, which must be saved for backward.
    #[must_use]
    pub fn output(&self, i: usize) -> &Tensor {
        get_or_raise(self.outputs, i, "output").as_ref().unwrap_or_else(|| not_saved("output", i).raise())
    }

    /// The cotangent of output `i`; zeros in the dual layout if nothing used the output.
    #[must_use]
    pub fn grad(&self, i: usize) -> Tensor {
        let zeros = || Tensor::zeros(self.rank, &self.output_layouts[i].dual()).unwrap_or_else(|e| e.raise());
        get_or_raise(self.grads, i, "the cotangent of output").clone().unwrap_or_else(zeros)
    }

    /// The layout that the cotangent of argument `i` must have: the dual of the layout of the argument.
    #[must_use]
    pub fn cotangent_layout(&self, i: usize) -> Layout {
        get_or_raise(self.input_layouts, i, "argument").dual()
    }

    /// The cotangent of argument `i` as the first output of an op: in the layout that it must have, which determines extent and
    /// sharding of labels that no argument of the op has, and added to the accumulator of the argument if the op takes the sum.
    ///
    /// # Panics
    /// Unwinds with the error of the op; so does the method below.
    #[track_caller]
    #[must_use]
    pub fn cotangent(&self, i: usize, op: impl OpHandle, args: &[&Tensor]) -> Tensor {
        let options = OutputOptions {
            layouts: &[Some(self.cotangent_layout(i))],
            accumulators: &[self.accumulator(i)],
        };
        apply_first(op.as_op(), args, options, Location::caller())
    }

    /// All outputs of an op that may add each output to the accumulator given for the output.
    #[track_caller]
    #[must_use]
    pub fn apply(
        &self,
        op: &dyn Op,
        args: &[&Tensor],
        accumulators: &[Option<&GradAccumulator>],
    ) -> SmallVec<[Tensor; 2]> {
        let options = OutputOptions { accumulators, ..OutputOptions::default() };
        unwind(apply_with_options(op, args, options, Location::caller()))
    }

    /// Whether the cotangent of argument `i`, if it is a partial sum of 16-bit floats, is in the accumulator dtype: not where sums are
    /// canonical, because the ranks that hold the whole sum round each node.
    pub(crate) fn widens_partial_sums(&self, i: usize) -> bool {
        Context::of(self.rank).sum_tree().is_none() && !self.input_layouts[i].replicate().is_empty()
    }

    /// Calls `cotangent` for each argument whose cotangent is requested.
    ///
    /// The results get exactly the dual layout of the argument: a grain that differs but has the same shard boundaries is replaced
    /// by the grain of the argument.
    pub fn cotangents(&self, mut cotangent: impl FnMut(usize) -> Tensor) -> Cotangents {
        let with_dual_layout = |i: usize, t: Tensor| {
            let layout = t.layout();
            let argument = self.input_layouts[i].with_dtype(layout.dtype());
            if layout.is_dual_of(&argument) || !layout.is_equivalent_to(&argument.dual()) {
                return t;
            }
            Tensor::assemble(self.rank, argument.dual(), t.local().clone())
        };
        // Pushed one by one: `collect` reserves memory first, which costs more than a few pushes.
        let mut cotangents = Cotangents::new();
        for (i, &wanted) in self.needs_input_grad.iter().enumerate() {
            cotangents.push(wanted.then(|| with_dual_layout(i, cotangent(i))));
        }
        cotangents
    }
}

/// The value, or an unwinding panic with the error, which the rank boundary catches and returns.
#[track_caller]
pub fn unwind<T>(result: Result<T>) -> T {
    // Inside of a closure, Location::caller() would be the line of the closure.
    let site = Location::caller();
    result.unwrap_or_else(|e| e.at(site).raise())
}

/// An estimate of the work of an op on some layouts, for the cost of pipeline stages: [`Op::estimate_work`]. Runs no kernel.
#[must_use]
pub fn estimate_work(op: &dyn Op, rank: &Rank, args: &[&Layout], outputs: &[Layout]) -> usize {
    op.estimate_work(iteration_space(op, rank, args, outputs), args, outputs)
}

/// The number of index tuples of the signature of an op: the product of the extents of all labels.
#[must_use]
pub fn iteration_space(op: &dyn Op, rank: &Rank, args: &[&Layout], outputs: &[Layout]) -> usize {
    let signature = Context::of(rank).signature(op.signature());
    let output_numel = outputs.first().map_or(0, Layout::numel);
    let Ok(labels) =
        signature.bind(|i| args.get(i).map_or(0, |l| l.ndim()), |k| outputs.get(k).map(Layout::ndim))
    else {
        return output_numel;
    };
    let mut extents: SmallVec<[usize; 8]> = SmallVec::from_elem(1, labels.count());
    for (layout, row) in args.iter().zip(labels.inputs()) {
        for (d, label) in row.iter().enumerate().take(layout.ndim()) {
            if let Some(extent) = extents.get_mut(usize::from(*label)) {
                *extent = (*extent).max(layout.extent(d));
            }
        }
    }
    extents.iter().fold(1, |all: usize, extent| all.saturating_mul(*extent)).max(output_numel)
}
