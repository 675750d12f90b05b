//! Buckets of gradients: tensors that the same reduction brings to the layouts of their parameters share one collective.
//!
//! A bucket is closed, and its collective begins, when its tensors reach a number of bytes. They come in the order in which the backward
//! pass completes them, so that reductions run during the rest of the pass. A sum over ranks adds each element by itself, in the order
//! of group ranks wherever the element is in the buffer, so that a bucket gives the same bits as one call per tensor. All ranks close the
//! same buckets: what counts is the size of the largest local tensor, which is the same on all ranks. Li et al., "PyTorch
//! Distributed: Experiences on Accelerating Data Parallel Training", arXiv 2006.15704.

use super::redistribute::{ASYNC_BYTES_MIN, PendingTensor, StepRunner, sum_packed};
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::lineage::Lineage;
use crate::layout::placement::Placement;
use crate::layout::step::{Step, max_local_numel};
use crate::tensor::Tensor;
use shardgrad_dist::{AxisSet, Rank, Result};
use shardgrad_kernels::{DType, Strides};
use std::collections::VecDeque;
use std::panic::Location;
use std::rc::Rc;

/// The most buckets that are reduced while the backward pass goes on: one on the wire, one that waits.
const PENDING_MAX: usize = 2;

/// The bytes at which buckets of gradients are closed.
#[doc(alias = "bucket_cap_mb")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketBytes {
    /// Of the first bucket of a backward pass: smaller, so that the first reduction begins early.
    pub first: usize,
    /// Of all others. A tensor of at least as many bytes is reduced by itself, without a copy.
    pub others: usize,
}

/// PyTorch's sizes, 1 MiB and 25 MiB.
impl Default for BucketBytes {
    fn default() -> BucketBytes {
        BucketBytes { first: 1 << 20, others: 25 << 20 }
    }
}

impl BucketBytes {
    /// Sizes for a backward pass with blocking calls, those of other groups or gathers of parameters: 1 MiB and 4 MiB. A rank issues its
    /// calls in one order, so that a blocking call waits for the buckets before it.
    #[must_use]
    pub fn between_blocking_calls() -> BucketBytes {
        BucketBytes { others: 4 << 20, ..BucketBytes::default() }
    }
}

/// A gradient to bring to the layout of its parameter.
#[derive(Clone, Debug)]
pub struct ReductionRequest {
    /// The gradient as it was computed, in the dtype of the result.
    pub gradient: Tensor,
    /// The steps to its new layout.
    pub steps: Vec<Step>,
    /// The new layout.
    pub to: Layout,
    /// The name of the parameter, for traces and errors.
    pub path: Rc<str>,
    /// The caller's line.
    pub site: &'static Location<'static>,
}

/// The buckets of the gradients of one rank.
#[derive(Debug, Default)]
pub struct ReduceBuckets {
    bytes: BucketBytes,
    /// The number of requests so far.
    num_requests: usize,
    /// Whether a collective has begun since the last [`ReduceBuckets::finish`].
    has_begun: bool,
    /// In the order in which they were opened.
    open: Vec<OpenBucket>,
    /// In the order in which they began.
    begun: VecDeque<BegunBucket>,
    /// Tensors of reduced buckets with steps left, which all ranks take together in [`ReduceBuckets::finish`].
    halfway: Vec<(Member, LocalTensor)>,
    /// Tensors that need nothing more, with the numbers of their requests.
    done: Vec<(usize, Tensor)>,
}

/// The collective of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reduction {
    axes: AxisSet,
    dtype: DType,
    /// Whether each rank gets a part of the sum, and not all of it.
    scatters: bool,
}

/// A bucket that takes more tensors.
#[derive(Debug)]
struct OpenBucket {
    reduction: Reduction,
    bytes: usize,
    tensors: Vec<(Member, LocalTensor)>,
}

/// A bucket whose collective was issued.
#[derive(Debug)]
struct BegunBucket {
    sum: PendingTensor,
    members: Vec<Member>,
}

/// A tensor on its way.
#[derive(Debug)]
struct Member {
    /// The number of its request.
    number: usize,
    /// The layout so far.
    layout: Layout,
    lineage: Lineage,
    /// The steps from there on, the next one last.
    steps: Vec<Step>,
    to: Layout,
    path: Rc<str>,
    site: &'static Location<'static>,
}

impl Reduction {
    /// The reduction of a step; `None` for other steps.
    fn of(from: &Layout, step: &Step) -> Option<Reduction> {
        let is_partial = from.placement(step.axis()) == Placement::Partial;
        let scatters = matches!(step.to, Placement::Shard(_));
        let reduces = is_partial && step.to != Placement::Partial;
        reduces.then(|| Reduction { axes: step.axes, dtype: from.dtype(), scatters })
    }
}

impl Member {
    /// The next step.
    fn step(&self) -> Step {
        *self.steps.last().expect("a member of a bucket has a step left")
    }

    /// Runs the next step alone.
    fn run_step(&mut self, rank: &Rank, local: LocalTensor) -> Result<LocalTensor> {
        let (step, to) = (self.step(), self.after());
        let runner = StepRunner { rank, from: &self.layout, to: &to, axes: step.axes, site: self.site };
        let moved = runner.run(local, step.to)?;
        self.steps.pop();
        self.layout = to;
        Ok(moved)
    }

    /// The layout after the next step.
    fn after(&self) -> Layout {
        self.layout.after(&self.step())
    }

    /// The size of the largest local tensor over all ranks.
    fn bytes(&self) -> usize {
        max_local_numel(&self.layout, &[]) as usize * self.layout.dtype().size()
    }

    /// The shapes in which the ranks of the group hold the tensor after a reduce-scatter, in group order.
    fn part_shapes(&self, rank: &Rank) -> Vec<Vec<usize>> {
        let (to, step) = (self.after(), self.step());
        StepRunner { rank, from: &self.layout, to: &to, axes: step.axes, site: self.site }
            .part_shapes(&to, step.axis())
    }
}

impl ReduceBuckets {
    /// Empty buckets of a size.
    #[must_use]
    pub fn of(bytes: BucketBytes) -> ReduceBuckets {
        ReduceBuckets { bytes, ..ReduceBuckets::default() }
    }

    /// Whether these are empty buckets of the default sizes, which never had a request.
    #[must_use]
    pub fn is_unused(&self) -> bool {
        self.num_requests == 0 && self.bytes == BucketBytes::default()
    }

    /// Adds a gradient to its bucket, and begins to reduce the bucket if it is full. Returns the number of the request, from 0. A
    /// collective call: every rank calls it together, with like requests.
    ///
    /// # Errors
    /// Errors of the collectives, `Kind::OutOfMemory`.
    pub fn add(&mut self, rank: &Rank, request: ReductionRequest) -> Result<usize> {
        let number = self.num_requests;
        self.num_requests += 1;
        let ReductionRequest { gradient, mut steps, to, path, site } = request;
        steps.reverse();
        let (layout, local) = (gradient.layout().clone(), gradient.local().clone());
        drop(gradient);
        let member = Member { number, layout, lineage: local.lineage, steps, to, path, site };
        self.advance(rank, member, local)?;
        Ok(number)
    }

    /// Waits for all reductions, those of buckets that are not full included. Returns the results with the numbers of their requests,
    /// in the order of the requests. A collective call.
    ///
    /// # Errors
    /// As [`ReduceBuckets::add`].
    pub fn finish(&mut self, rank: &Rank) -> Result<Vec<(usize, Tensor)>> {
        loop {
            for bucket in std::mem::take(&mut self.open) {
                // Nothing is left to compute meanwhile.
                self.begin(rank, bucket, false)?;
            }
            self.take_apart_begun(rank, 0)?;
            if self.halfway.is_empty() {
                break;
            }
            for (member, local) in std::mem::take(&mut self.halfway) {
                self.advance(rank, member, local)?;
            }
        }
        self.has_begun = false;
        Ok(self.take_arrived())
    }

    /// The results that have arrived since the last call, with the numbers of their requests, in the order of the requests. Which ones
    /// depends on the requests alone, not on time, so that all ranks go on alike.
    pub fn take_arrived(&mut self) -> Vec<(usize, Tensor)> {
        self.done.sort_unstable_by_key(|(number, _)| *number);
        std::mem::take(&mut self.done)
    }

    /// Runs the steps of a tensor until one of them belongs into a bucket.
    fn advance(&mut self, rank: &Rank, mut member: Member, mut local: LocalTensor) -> Result<()> {
        while let Some(step) = member.steps.last() {
            if let Some(reduction) = Reduction::of(&member.layout, step) {
                return self.put(rank, reduction, (member, local));
            }
            local = member.run_step(rank, local)?;
        }
        local.lineage = member.lineage;
        self.done.push((member.number, Tensor::assemble(rank, member.to, local)));
        Ok(())
    }

    /// Puts a tensor into the open bucket of its reduction.
    fn put(&mut self, rank: &Rank, reduction: Reduction, tensor: (Member, LocalTensor)) -> Result<()> {
        let bytes = tensor.0.bytes();
        if bytes >= self.bytes.others {
            return self.begin(rank, OpenBucket { reduction, bytes, tensors: vec![tensor] }, true);
        }
        let at = self.open.iter().position(|bucket| bucket.reduction == reduction).unwrap_or_else(|| {
            self.open.push(OpenBucket { reduction, bytes: 0, tensors: Vec::new() });
            self.open.len() - 1
        });
        let bucket = &mut self.open[at];
        bucket.bytes += bytes;
        bucket.tensors.push(tensor);
        let limit = if self.has_begun { self.bytes.others } else { self.bytes.first };
        if bucket.bytes < limit {
            return Ok(());
        }
        let bucket = self.open.remove(at);
        self.begin(rank, bucket, true)
    }

    /// Issues the collective of a bucket. Where it `may_overlap` with later work, at most [`PENDING_MAX`] buckets are under way.
    fn begin(&mut self, rank: &Rank, bucket: OpenBucket, may_overlap: bool) -> Result<()> {
        self.has_begun = true;
        let OpenBucket { reduction, tensors, bytes } = bucket;
        let may_overlap = may_overlap && bytes >= ASYNC_BYTES_MIN;
        // Before more memory is taken.
        self.take_apart_begun(rank, PENDING_MAX - 1)?;
        let (members, locals): (Vec<Member>, Vec<LocalTensor>) = tensors.into_iter().unzip();
        let lineage = members.iter().fold(Lineage::UNKNOWN, |all, member| all.join(member.lineage));
        let (context, site) = (Context::of(rank), members[0].site);
        let before = context.path();
        context.set_path(&joined_paths(&members));
        let (packed, counts) = match reduction.scatters {
            false => (pack(rank, locals)?, None),
            true => {
                let (packed, counts) = pack_parts(rank, &members, locals)?;
                (packed, Some(counts))
            }
        };
        let sum = sum_packed(rank, (&packed, lineage), counts.as_deref(), reduction.axes, may_overlap, site);
        context.set_path(&before);
        let sum = sum?;
        let num_pending = if sum.is_async() { PENDING_MAX } else { 0 };
        self.begun.push_back(BegunBucket { sum, members });
        self.take_apart_begun(rank, num_pending)
    }

    /// Takes apart reduced buckets, the oldest first, until at most `num_pending` are left: each tensor is a view of what was received.
    fn take_apart_begun(&mut self, rank: &Rank, num_pending: usize) -> Result<()> {
        while self.begun.len() > num_pending {
            let Some(BegunBucket { sum, members }) = self.begun.pop_front() else { break };
            let received = sum.wait()?;
            let mut offset = received.view.offset;
            for mut member in members {
                member.layout = member.after();
                member.steps.pop();
                let view = Strides::contiguous(&member.layout.local_shape(rank.coordinates())).at(offset);
                offset += view.numel();
                let local = LocalTensor { lineage: member.lineage, ..received.with_view(view) };
                match member.steps.is_empty() {
                    true => self.done.push((member.number, Tensor::assemble(rank, member.to, local))),
                    false => self.halfway.push((member, local)),
                }
            }
        }
        Ok(())
    }
}

/// The elements of local tensors of one dtype, one tensor after the other; a single one is not copied.
fn pack(rank: &Rank, locals: Vec<LocalTensor>) -> Result<LocalTensor> {
    if let [one] = &locals[..] {
        return one.flat(rank);
    }
    let total = locals.iter().map(LocalTensor::numel).sum();
    let mut packed = LocalTensor::alloc(rank, locals[0].dtype, &[total])?;
    let mut offset = 0;
    for local in locals {
        packed.write(rank, Strides::contiguous(&local.view.shape).at(offset), &local)?;
        offset += local.numel();
    }
    Ok(packed)
}

/// The parts of local tensors for the first rank of the group, then those for the second, and so on; and the numbers of their
/// elements.
fn pack_parts(
    rank: &Rank,
    members: &[Member],
    locals: Vec<LocalTensor>,
) -> Result<(LocalTensor, Vec<usize>)> {
    let shapes: Vec<Vec<Vec<usize>>> = members.iter().map(|member| member.part_shapes(rank)).collect();
    let numel = |shape: &Vec<usize>| shape.iter().product::<usize>();
    let group_ranks = 0..shapes[0].len();
    let counts: Vec<usize> =
        group_ranks.clone().map(|i| shapes.iter().map(|parts| numel(&parts[i])).sum()).collect();
    let afters: Vec<Layout> = members.iter().map(Member::after).collect();
    let runner = |at: usize| {
        let Member { layout, site, .. } = &members[at];
        StepRunner { rank, from: layout, to: &afters[at], axes: members[at].step().axes, site }
    };
    let dim = |at: usize| match members[at].step().to {
        Placement::Shard(dim) => dim,
        _ => unreachable!("bug: a reduce-scatter to a layout without shards"),
    };
    let axis = members[0].step().axis();
    if let [one] = &locals[..] {
        return Ok((runner(0).pack(one, dim(0), axis, &counts)?, counts));
    }
    let mut packed = LocalTensor::alloc(rank, locals[0].dtype, &[counts.iter().sum()])?;
    let mut offset = 0;
    for group_rank in group_ranks {
        for (at, local) in locals.iter().enumerate() {
            let part = runner(at).part_of(local, dim(at), axis, group_rank);
            packed.write(rank, Strides::contiguous(&part.view.shape).at(offset), &part)?;
            offset += part.numel();
        }
    }
    Ok((packed, counts))
}

/// The names of all members, as [`shardgrad_dist::Record::members`] takes them apart.
fn joined_paths(members: &[Member]) -> Rc<str> {
    match members {
        [one] => one.path.clone(),
        several => {
            let paths: Vec<&str> = several.iter().map(|member| &*member.path).collect();
            paths.join(shardgrad_dist::MEMBER_SEPARATOR).into()
        }
    }
}
