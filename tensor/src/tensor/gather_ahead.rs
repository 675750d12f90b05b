//! All-gathers that begin before their results are needed: small tensors share a collective, and the kernels that arrange the received
//! parts run at the end, so that the rank computes in between, while a communication stream or thread gathers.

use super::redistribute::{PendingTensor, StepRunner, all_gather_parts, run};
use crate::execution::context::Context;
use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::layout::lineage::Lineage;
use crate::layout::placement::Placement;
use crate::layout::step::Step;
use crate::tensor::Tensor;
use shardgrad_dist::{Axis, AxisSet, MEMBER_SEPARATOR, Rank, Result};
use shardgrad_kernels::Strides;
use std::panic::Location;
use std::rc::Rc;

/// Gathered tensors of at most this many bytes share a collective: below, the latency of a call costs more than the copies.
pub const SHARED_BYTES_MAX: usize = 64 << 10;

/// A tensor to gather.
#[derive(Clone, Debug)]
pub struct GatherRequest {
    /// The tensor as it is stored.
    pub from: Tensor,
    /// The layout to bring it to, of the same dtype or of a narrower float.
    pub to: Layout,
    /// Its name, for traces and errors.
    pub path: Rc<str>,
}

/// All-gathers in progress.
#[derive(Debug)]
pub struct BegunGathers {
    rank: Rank,
    site: &'static Location<'static>,
    /// The results that need nothing more.
    done: Vec<Option<Tensor>>,
    collectives: Vec<SharedGather>,
}

/// One collective: the parts of all its tensors of rank 0, then those of rank 1, and so on.
#[derive(Debug)]
struct SharedGather {
    received: PendingTensor,
    tensors: Vec<GatheredTensor>,
}

/// A tensor in a collective.
#[derive(Debug)]
struct GatheredTensor {
    /// Its index among the requests.
    index: usize,
    goal: Layout,
    lineage: Lineage,
    /// The layouts before and after the gather, the dim and the axis.
    from: Layout,
    to: Layout,
    dim: usize,
    axis: Axis,
    /// The local shapes of the members of the group.
    parts: Vec<Vec<usize>>,
    path: Rc<str>,
}

impl GatheredTensor {
    /// The tensor of a request, if one all-gather brings it to its layout, besides steps that move nothing.
    fn new(
        index: usize,
        request: &GatherRequest,
        from: &Layout,
        steps: &[Step],
        site: &'static Location<'static>,
    ) -> Option<GatheredTensor> {
        let mut layout = from.clone();
        let mut gather = None;
        for step in steps {
            let to = layout.after(step);
            let axis = step.axes.iter().next()?;
            match (layout.placement(axis), step.to) {
                (
                    Placement::Invariant | Placement::Replicate,
                    Placement::Invariant | Placement::Replicate,
                ) => {}
                (Placement::Shard(dim), Placement::Invariant | Placement::Replicate) if gather.is_none() => {
                    gather = Some((layout.clone(), to.clone(), dim, axis));
                }
                _ => return None,
            }
            layout = to;
        }
        let (from, to, dim, axis) = gather?;
        let rank = request.from.rank();
        let runner = StepRunner { rank, from: &from, to: &to, axes: AxisSet::one(axis), site };
        let (parts, lineage) = (runner.part_shapes(&from, axis), request.from.local().lineage);
        let (goal, path) = (request.to.clone(), request.path.clone());
        Some(GatheredTensor { index, goal, lineage, from, to, dim, axis, parts, path })
    }

    /// The bytes of the gathered tensor.
    fn bytes(&self) -> usize {
        self.part_counts().sum::<usize>() * self.goal.dtype().size()
    }

    /// The number of elements of each member.
    fn part_counts(&self) -> impl Iterator<Item = usize> {
        self.parts.iter().map(|shape| shape.iter().product())
    }

    /// The received part of each member in a flat buffer, from these offsets on, arranged along the dim.
    fn arrange(
        &self,
        rank: &Rank,
        received: &LocalTensor,
        offsets: &mut [usize],
        site: &'static Location<'static>,
    ) -> Result<LocalTensor> {
        let runner = StepRunner { rank, from: &self.from, to: &self.to, axes: AxisSet::one(self.axis), site };
        let starts: Vec<usize> = offsets.to_vec();
        offsets.iter_mut().zip(self.part_counts()).for_each(|(offset, count)| *offset += count);
        runner.concat_parts_at(
            received,
            &self.parts,
            starts.into_iter(),
            self.dim,
            &self.to.local_shape(rank.coordinates()),
        )
    }
}

impl BegunGathers {
    /// Begins to gather some tensors. A collective call: every rank of the groups concerned calls it together, with the same
    /// requests. Without `may_overlap`, a CPU waits here: where nothing is computed before the results are needed, handing calls to the
    /// communication thread gains nothing.
    ///
    /// # Errors
    /// Errors of the collectives, `Kind::OutOfMemory`; `Kind::Layout` if there is no route to a layout.
    pub fn begin(
        rank: &Rank,
        requests: &[GatherRequest],
        may_overlap: bool,
        site: &'static Location<'static>,
    ) -> Result<BegunGathers> {
        let context = Context::of(rank);
        let mut gathers = BegunGathers {
            rank: rank.clone(),
            site,
            done: vec![None; requests.len()],
            collectives: Vec::new(),
        };
        let mut shared: Vec<Vec<(GatheredTensor, LocalTensor)>> = Vec::new();
        for (index, request) in requests.iter().enumerate() {
            let GatherRequest { from, to, path } = request;
            let dtype = to.dtype();
            let start = from.layout().with_dtype(dtype);
            let route = context.routes.route(&start, to, dtype.is_float())?;
            let local = if from.dtype() == dtype {
                from.local().clone()
            } else {
                from.local().to_dtype(rank, dtype)?
            };
            let Some(tensor) = GatheredTensor::new(index, request, &start, &route.steps, site) else {
                context.set_path(path);
                gathers.done[index] =
                    Some(run(&Tensor::assemble(rank, start, local), &route.steps, to, site)?);
                continue;
            };
            let is_small = |tensor: &GatheredTensor| tensor.bytes() <= SHARED_BYTES_MAX;
            let fits = |all: &&mut Vec<(GatheredTensor, LocalTensor)>| {
                let (first, _) = &all[0];
                let is_alike = (first.axis, first.goal.dtype()) == (tensor.axis, dtype);
                is_alike && is_small(first) && is_small(&tensor)
            };
            match shared.iter_mut().find(fits) {
                Some(all) => all.push((tensor, local)),
                None => shared.push(vec![(tensor, local)]),
            }
        }
        for tensors in shared {
            context.set_path(&shared_path(&tensors));
            gathers.collectives.push(SharedGather::begin(rank, tensors, may_overlap, site)?);
        }
        Ok(gathers)
    }

    /// The gathered tensors, in the order of the requests.
    ///
    /// # Errors
    /// Errors of the collectives, `Kind::OutOfMemory`.
    pub fn finish(mut self) -> Result<Vec<Tensor>> {
        for SharedGather { received, tensors } in self.collectives {
            let received = received.wait()?;
            let num_members = tensors[0].parts.len();
            let count_of = |member: usize| {
                tensors.iter().map(move |t| t.part_counts().nth(member).unwrap_or(0)).sum::<usize>()
            };
            let mut offsets: Vec<usize> = (0..num_members)
                .scan(0, |end, member| {
                    let start = *end;
                    *end += count_of(member);
                    Some(start)
                })
                .collect();
            for tensor in &tensors {
                let mut local = tensor.arrange(&self.rank, &received, &mut offsets, self.site)?;
                local.lineage = tensor.lineage;
                self.done[tensor.index] = Some(Tensor::assemble(&self.rank, tensor.goal.clone(), local));
            }
        }
        Ok(self.done.into_iter().flatten().collect())
    }
}

impl SharedGather {
    /// Gathers the parts of some tensors over one axis in one collective.
    fn begin(
        rank: &Rank,
        tensors: Vec<(GatheredTensor, LocalTensor)>,
        may_overlap: bool,
        site: &'static Location<'static>,
    ) -> Result<SharedGather> {
        let (tensors, locals): (Vec<GatheredTensor>, Vec<LocalTensor>) = tensors.into_iter().unzip();
        let flats: Vec<LocalTensor> = locals.iter().map(|local| local.flat(rank)).collect::<Result<_>>()?;
        let own = match &flats[..] {
            [one] => one.clone(),
            several => {
                let total = several.iter().map(LocalTensor::numel).sum();
                let mut packed = LocalTensor::alloc(rank, several[0].dtype, &[total])?;
                let mut offset = 0;
                for flat in several {
                    packed.write(rank, Strides::contiguous(&flat.view.shape).at(offset), flat)?;
                    offset += flat.numel();
                }
                packed
            }
        };
        let lineage = tensors.iter().fold(Lineage::UNKNOWN, |all, tensor| all.join(tensor.lineage));
        let mut counts = vec![0; tensors[0].parts.len()];
        for tensor in &tensors {
            counts.iter_mut().zip(tensor.part_counts()).for_each(|(count, part)| *count += part);
        }
        let axis = tensors[0].axis;
        let received = all_gather_parts(rank, (&own, lineage), &counts, axis, may_overlap, site)?;
        Ok(SharedGather { received, tensors })
    }
}

/// The innermost module that holds all tensors, or the list of their paths.
fn shared_path(tensors: &[(GatheredTensor, LocalTensor)]) -> Rc<str> {
    let first = &tensors[0].0.path;
    let ends = first.match_indices('.').map(|(dot, _)| dot).chain([first.len()]).rev();
    let is_shared = |prefix: &&str| {
        let is_below = |path: &str| {
            path.strip_prefix(*prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
        };
        tensors.iter().all(|(tensor, _)| is_below(&tensor.path))
    };
    let module = ends.map(|end| &first[..end]).find(is_shared);
    module.map_or_else(
        || {
            let paths: Vec<&str> = tensors.iter().map(|(tensor, _)| &*tensor.path).collect();
            paths.join(MEMBER_SEPARATOR).into()
        },
        Rc::from,
    )
}
