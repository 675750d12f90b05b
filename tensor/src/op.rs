//! What an op is, and how one is applied: infer or refuse, take the implied steps, run the local piece.

mod offer;
mod local;
mod message;
mod mistake;
mod plan;
mod volume;

use crate::context::Context;
use crate::infer::Inference;
use crate::layout::Layout;
use crate::memo::Question;
use crate::piece::{Piece, listed};
pub use crate::plans::Fixed;
use crate::refusal::Refusal;
use crate::tensor::Tensor;
use crate::watch::Watch;
pub use local::Local;
use message::failed;
pub use message::offers;
use mistake::{are_as_inferred, check_pieces, guarded, numbered, unkept};
pub use mistake::{check_given, check_lawful};
pub use offer::Offer;
pub use plan::plan;
use shardgrad_dist::{Error, Kind, Rank, Result};
use shardgrad_kernels::DType;
use smallvec::{SmallVec, smallvec};
use std::cell::RefCell;
use std::fmt;
use std::panic::Location;
use std::rc::Rc;
pub use volume::{tuples, volume};

/// Local results of one forward: the outputs, then the values kept for the vjp.
pub type Pieces = SmallVec<[Piece; 1]>;
/// One entry per argument: its cotangent, or `None` where it was not wanted.
pub type Cotangents = SmallVec<[Option<Tensor>; 4]>;
/// Dtypes of all outputs, saved ones included.
pub type DTypes = SmallVec<[DType; 4]>;

/// An operation, stated once. Everything else is derived from what stands here.
pub trait Op: fmt::Debug + 'static {
    /// Name in messages, traces and the op table.
    fn name(&self) -> &'static str;

    /// Index signature (see [`Signature`](crate::signature::Signature)). Outputs that only the vjp reads come last.
    fn signature(&self) -> &str;

    /// The type and the signature, where they are all that dtypes and layouts of the outputs depend on beside the arguments: then
    /// what was inferred once is found by them, without asking the op. So it is by default where there are no fields; an op with
    /// fields may say that they do not matter.
    fn fixed(&self) -> Option<Fixed> {
        Fixed::of_unit(self, self.signature())
    }

    /// Groups of arguments in which the op is linear jointly, the other arguments held fixed.
    fn linear_in(&self) -> &'static [&'static [usize]] {
        &[]
    }

    /// Per argument, whether it has a cotangent; shorter than the arguments means `true` for the rest.
    fn differentiable(&self) -> &'static [bool] {
        &[]
    }

    /// How many trailing outputs are kept for the vjp and hidden from the user.
    fn num_saved(&self) -> usize {
        0
    }

    /// Which arguments and which outputs (saved ones included) the vjp reads.
    fn keeps(&self) -> Keeps {
        Keeps { inputs: &[], outputs: &[] }
    }

    /// Dtypes of the outputs. The default: all arguments have one float dtype, and so have the outputs.
    ///
    /// # Errors
    /// `Kind::DType` where the arguments do not fit.
    fn dtypes(&self, inputs: &[DType], num_outputs: usize) -> Result<DTypes> {
        let dtype = common_float(inputs)?;
        let mut outputs = DTypes::new();
        (0..num_outputs).for_each(|_| outputs.push(dtype));
        Ok(outputs)
    }

    /// Steps and output layouts. The default derives them from the signature.
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
        infer_by_signature(self, context, args, dtypes, want)
    }

    /// The same op with the random numbers of another step, the batch beginning at row `first_row`; `None` for ops that
    /// draw none, or always the same. A recorded program is replayed with it.
    fn redrawn(&self, step: u64, first_row: u64) -> Option<Rc<dyn Op>> {
        let _ = (step, first_row);
        None
    }

    /// About how many multiply-adds a forward pass takes, or how many elements it goes through: the largest tensor of the op.
    /// `outputs` are the visible ones. An op that multiplies every index with every other gives `tuples`, which its signature
    /// runs over.
    fn volume(&self, tuples: usize, args: &[&Layout], outputs: &[Layout]) -> usize {
        let _ = tuples;
        args.iter().copied().chain(outputs).map(Layout::numel).max().unwrap_or(0)
    }

    /// The kept argument whose memory the vjp writes over, if nobody else holds it: [`Vjp::take`]. Only of an op that is
    /// differentiable in it alone, whose vjp is then the last that reads it.
    fn consumes(&self) -> Option<usize> {
        None
    }

    /// Whether the vjp asks for what other uses of the arguments have given ([`Vjp::sum`]): only then it is offered.
    fn takes_sums(&self) -> bool {
        false
    }

    /// This rank's piece of the work. Only ops that override [`Op::infer`] may talk to other ranks.
    ///
    /// # Errors
    /// What kernels report.
    fn forward(&self, local: &Local<'_>, x: &[&Piece]) -> Result<Pieces>;

    /// What [`Op::vjp`] reads where the cotangents of these arguments only will ever be wanted: a frozen weight, say, makes
    /// that of the other argument alone.
    fn keeps_for(&self, wanted: &[bool]) -> Keeps {
        let _ = wanted;
        self.keeps()
    }

    /// Cotangents of the wanted arguments, in the dual layouts of the arguments; a pending one of a 16-bit argument may be in the
    /// accumulator ([`check_lawful`]). No step may be needed.
    ///
    /// # Panics
    /// The default unwinds with `Kind::Unsupported`: an op without differentiable arguments is never asked.
    fn vjp(&self, _: &Vjp<'_>) -> Cotangents {
        Error::new(Kind::Unsupported, format!("{} has no vjp", self.name()))
            .detail("help", "write Op::vjp, or declare the arguments not differentiable (Op::differentiable)")
            .raise()
    }
}

/// The rule that the signature states, without any override. What was inferred before is remembered.
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
    let question = Question {
        signature: &signature,
        linear_in: op.linear_in(),
        differentiable: op.differentiable(),
        args,
        out_dtypes: dtypes,
        want,
    };
    context.inferences.answer(&question)
}

/// Per argument, whether the op is differentiable in it and it is a float.
pub fn differentiable_args<O: Op + ?Sized>(op: &O, args: &[&Layout]) -> SmallVec<[bool; 6]> {
    let declared = op.differentiable();
    args.iter()
        .enumerate()
        .map(|(i, l)| declared.get(i).copied().unwrap_or(true) && l.dtype().is_float())
        .collect()
}

/// Which values a vjp reads; nothing else is kept alive by the tape.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Keeps {
    /// Indices of arguments.
    pub inputs: &'static [usize],
    /// Indices of outputs.
    pub outputs: &'static [usize],
}

impl Keeps {
    /// Of an op that is linear in each of its first two arguments: the cotangent of one reads the other.
    #[must_use]
    pub fn of_product(wanted: &[bool]) -> Keeps {
        let inputs: &[usize] = match wanted {
            all if !all.contains(&true) => &[],
            [true, rest @ ..] if !rest.contains(&true) => &[1],
            [false, ..] => &[0],
            _ => &[0, 1],
        };
        Keeps { inputs, outputs: &[] }
    }
}

/// The one float dtype that all of some arguments have.
///
/// # Errors
/// `Kind::DType` if one is no float, or there are two.
pub fn common_float(inputs: &[DType]) -> Result<DType> {
    if let Some(i) = inputs.iter().position(|d| !d.is_float()) {
        return Err(Error::new(Kind::DType, format!("argument {i} is {}, which is no float", inputs[i])));
    }
    let first = *inputs.first().ok_or_else(|| Error::new(Kind::DType, "needs a float argument"))?;
    match inputs.iter().find(|d| **d != first) {
        None => Ok(first),
        Some(other) => Err(Error::new(Kind::DType, format!("arguments of {first} and {other}"))
            .detail("help", "cast one of them: x.cast(DType::F32)")),
    }
}

/// What a vjp is given: the kept values, the layouts of all, the cotangents of the outputs, and the mask.
#[derive(Debug)]
pub struct Vjp<'a> {
    /// The rank that runs it.
    pub rank: &'a Rank,
    /// The arguments that [`Op::keeps`] names.
    pub inputs: &'a [Option<Tensor>],
    /// The outputs that [`Op::keeps`] names, saved ones included.
    pub outputs: &'a [Option<Tensor>],
    /// Layouts of all arguments, after the implied steps.
    pub input_layouts: &'a [Layout],
    /// Layouts of all outputs.
    pub output_layouts: &'a [Layout],
    /// Cotangents of the outputs; `None` where an output had no use.
    pub grads: &'a [Option<Tensor>],
    /// Which arguments' cotangents are wanted.
    pub wanted: &'a [bool],
    /// The argument that [`Op::consumes`] names, which is not among the inputs then; they may hold it instead.
    pub taken: RefCell<Option<Tensor>>,
    /// Per argument, the cotangents that other uses have given it, if [`Op::takes_sums`]; none behind the end. See [`Vjp::sum`].
    pub sums: &'a [Offer],
}

impl Vjp<'_> {
    /// A kept argument.
    ///
    /// # Panics
    /// Unwinds with `Kind::Unsupported` if it is not kept, or there is none of this number; so do the methods below.
    #[must_use]
    pub fn input(&self, i: usize) -> &Tensor {
        numbered(self.inputs, i, "argument").as_ref().unwrap_or_else(|| unkept("argument", i).raise())
    }

    /// The argument that the op consumes.
    #[must_use]
    pub fn take(&self, i: usize) -> Tensor {
        self.taken.take().unwrap_or_else(|| self.input(i).clone())
    }

    /// What other uses of argument `i` have given it, for [`Tensor::apply_onto`] and the like: if that takes it up, the cotangent
    /// that the vjp gives is the sum.
    #[must_use]
    pub fn sum(&self, i: usize) -> Option<&Offer> {
        self.sums.get(i)
    }

    /// A kept output.
    #[must_use]
    pub fn output(&self, i: usize) -> &Tensor {
        numbered(self.outputs, i, "output").as_ref().unwrap_or_else(|| unkept("output", i).raise())
    }

    /// The cotangent of output `i`: zeros of the dual layout if it had no use.
    #[must_use]
    pub fn grad(&self, i: usize) -> Tensor {
        let zeros = || Tensor::zeros(self.rank, &self.output_layouts[i].dual()).unwrap_or_else(|e| e.raise());
        numbered(self.grads, i, "the cotangent of output").clone().unwrap_or_else(zeros)
    }

    /// The layout that the cotangent of argument `i` must have: the dual of the argument's.
    #[must_use]
    pub fn goal(&self, i: usize) -> Layout {
        numbered(self.input_layouts, i, "argument").dual()
    }

    /// One entry per argument, computed only where wanted, in exactly the dual layout of the argument: a grain that a
    /// cotangent took over from a neighbour of its argument, and that cuts at the same places, is named as there.
    pub fn each(&self, mut cotangent: impl FnMut(usize) -> Tensor) -> Cotangents {
        let named = |i: usize, t: Tensor| {
            let lies = t.layout();
            let of = self.input_layouts[i].with_dtype(lies.dtype());
            if lies.is_dual_of(&of) || !lies.agrees(&of.dual()) {
                return t;
            }
            Tensor::assemble(self.rank, of.dual(), t.piece().clone())
        };
        self.wanted.iter().enumerate().map(|(i, &w)| w.then(|| named(i, cotangent(i)))).collect()
    }
}

/// Arguments, and per output what it may be added to.
type Given<'a> = (&'a [&'a Piece], &'a [Option<&'a Offer>]);

/// Runs the local piece of an op on arguments that already have their target layouts, given by their pieces.
///
/// # Errors
/// What kernels and, for the few ops that talk to other ranks, collectives report.
pub fn run(
    op: &dyn Op,
    x: &[&Piece],
    inference: &Rc<Inference>,
    place: (&Rank, &Context),
    site: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 2]>> {
    run_onto(op, (x, &[]), inference, place, site)
}

/// [`run`] with what the outputs may be added to.
fn run_onto(
    op: &dyn Op,
    x: Given<'_>,
    inference: &Rc<Inference>,
    place: (&Rank, &Context),
    site: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 2]>> {
    with_pieces(op, x, inference, place, site, |pieces| {
        let tensor = |(i, piece)| Tensor::output(place.0, inference, i, piece);
        if pieces.len() == 1
            && let Some(piece) = pieces.pop()
        {
            return smallvec![tensor((0, piece))];
        }
        pieces.drain(..).enumerate().map(tensor).collect()
    })
}

/// [`run_onto`] for who needs the first output alone.
fn run_one(
    op: &dyn Op,
    x: Given<'_>,
    inference: &Rc<Inference>,
    place: (&Rank, &Context),
    site: &'static Location<'static>,
) -> Result<Tensor> {
    with_pieces(op, x, inference, place, site, |pieces| {
        pieces.truncate(1);
        Tensor::output(place.0, inference, 0, pieces.pop().expect("an op has an output"))
    })
}

/// Runs the local piece of an op and hands on what it made.
#[inline]
fn with_pieces<R>(
    op: &dyn Op,
    (x, sums): Given<'_>,
    inference: &Inference,
    (rank, context): (&Rank, &Context),
    site: &'static Location<'static>,
    take: impl FnOnce(&mut Pieces) -> R,
) -> Result<R> {
    let local = Local { rank, inputs: inference.inputs(), inference, site, sums };
    // Taken from where it lies: memory that was just written is slow to move.
    let go = || op.forward(&local, x);
    let mut made = if cfg!(debug_assertions) { guarded(op, &local, go) } else { go() };
    let Ok(outputs) = &mut made else {
        return Err(failed(made.expect_err("it is no output"), op, &local));
    };
    if !are_as_inferred(outputs, &local) {
        check_pieces(outputs, op, &local)?;
    }
    let lineage = local.lineage(x);
    for (i, output) in outputs.iter_mut().enumerate() {
        let sum = sums.get(i).copied().flatten();
        output.lineage = sum.map_or(lineage, |sum| sum.lineage(lineage));
    }
    if context.is_watched() {
        Watch::look(rank, op.name(), x, &outputs.iter().collect::<Vec<_>>(), site)?;
    }
    Ok(take(outputs))
}

/// The outputs of an op in outline: layouts without values. Nothing is computed, nothing moves.
#[must_use]
pub fn outline(inference: &Inference, rank: &Rank) -> SmallVec<[Tensor; 2]> {
    inference.outputs.iter().map(|layout| Tensor::outline(rank, layout)).collect()
}

/// Applies an op to plain tensors: implied steps are taken once per value and kept with it.
/// All outputs are returned, saved ones included. `want` guides labels that no argument has.
///
/// # Errors
/// What [`plan`] and [`run`] report.
pub fn apply(
    op: &dyn Op,
    args: &[&Tensor],
    want: &[Option<Layout>],
    site: &'static Location<'static>,
) -> Result<SmallVec<[Tensor; 2]>> {
    planned(op, args, want, site, |x, inference, place| run(op, x, inference, place, site))
}

/// Plans an op on plain tensors, takes the implied steps, and hands on the pieces, the plan and where it is to be run.
#[inline]
fn planned<R>(
    op: &dyn Op,
    args: &[&Tensor],
    want: &[Option<Layout>],
    site: &'static Location<'static>,
    go: impl Fn(&[&Piece], &Rc<Inference>, (&Rank, &Context)) -> Result<R>,
) -> Result<R> {
    let rank = args.first().expect("an op has at least one argument").rank();
    let place = (rank, Context::of(rank));
    let inference = listed(args, |t| t.layout(), |layouts| plan(op, place, layouts, want, site))?;
    if inference.targets.iter().all(Option::is_none) {
        return listed(args, |t| t.piece(), |x| go(x, &inference, place));
    }
    let moved = |(t, target): (&&Tensor, &Option<Layout>)| match target {
        None => Ok((*t).clone()),
        Some(layout) => crate::redistribute::implied(t, layout, site),
    };
    let moved: SmallVec<[Tensor; 4]> =
        args.iter().zip(&inference.targets).map(moved).collect::<Result<_>>()?;
    listed(&moved, Tensor::piece, |x| go(x, &inference, place))
}

impl Tensor {
    /// The visible outputs of an op on plain tensors. Misuse unwinds with the error.
    #[track_caller]
    #[must_use]
    pub fn results(op: Rc<dyn Op>, args: &[&Tensor]) -> SmallVec<[Tensor; 2]> {
        let mut outputs = unwind(apply(&*op, args, &[], Location::caller()));
        outputs.truncate(outputs.len() - op.num_saved());
        outputs
    }

    /// The one visible output of an op on plain tensors.
    #[track_caller]
    #[must_use]
    pub fn result(op: Rc<dyn Op>, args: &[&Tensor]) -> Tensor {
        Tensor::result_of(&*op, args)
    }

    /// [`Tensor::result`] of an op that nobody holds.
    #[track_caller]
    #[must_use]
    pub fn result_of(op: &dyn Op, args: &[&Tensor]) -> Tensor {
        one(op, (args, &[]), &[], Location::caller())
    }

    /// Applies an op with one visible output whose layout is known beforehand: it decides extent and split of labels
    /// that no argument has. This is what a vjp calls; the layout is the dual of the argument's.
    #[track_caller]
    #[must_use]
    pub fn apply_with(op: Rc<dyn Op>, args: &[&Tensor], want: Layout) -> Tensor {
        one(&*op, (args, &[]), &[Some(want)], Location::caller())
    }

    /// [`Tensor::apply_with`] of an op that may take up what was added up before, and give its sum with that.
    #[track_caller]
    #[must_use]
    pub fn apply_onto(op: Rc<dyn Op>, args: &[&Tensor], want: Layout, sum: Option<&Offer>) -> Tensor {
        one(&*op, (args, &[sum]), &[Some(want)], Location::caller())
    }

    /// All outputs of an op on plain tensors that may take up, per output, what was added up before, and give its sum with that.
    #[track_caller]
    #[must_use]
    pub fn results_onto(op: &dyn Op, args: &[&Tensor], sums: &[Option<&Offer>]) -> SmallVec<[Tensor; 2]> {
        let site = Location::caller();
        unwind(planned(op, args, &[], site, |x, inference, place| {
            run_onto(op, (x, sums), inference, place, site)
        }))
    }
}

/// The first output of an op on plain tensors. Misuse unwinds with the error.
fn one(
    op: &dyn Op,
    (args, sums): (&[&Tensor], &[Option<&Offer>]),
    want: &[Option<Layout>],
    site: &'static Location<'static>,
) -> Tensor {
    let made =
        planned(op, args, want, site, |x, inference, place| run_one(op, (x, sums), inference, place, site));
    made.unwrap_or_else(|e| e.at(site).raise())
}

/// The value, or an unwinding to the rank boundary with the error.
#[track_caller]
pub fn unwind<T>(result: Result<T>) -> T {
    // Inside of a closure the caller would be the closure's.
    let site = Location::caller();
    result.unwrap_or_else(|e| e.at(site).raise())
}
