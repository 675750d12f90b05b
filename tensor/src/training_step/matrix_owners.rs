//! Whole matrices for optimizers: the matrices of sharded tensors are gathered, each to one rank, its owner, and the
//! results of the owners go back to all shards and copies.
//!
//! A layout places one tensor by the same rule on every rank; "each matrix on one rank" places every matrix of a list
//! on another rank, so it is no layout of the algebra. Matrices are tensors on a mesh without axes here, and two
//! all-to-alls with unequal parts move them, whatever the number of matrices.

mod matrix_stack;

pub use matrix_stack::MatrixStack;

use crate::execution::local_tensor::LocalTensor;
use crate::layout::Layout;
use crate::tensor::Tensor;
use shardgrad_dist::{AxisSet, Call, Error, Kind, Origin, Phase, Rank, Result};
use shardgrad_kernels::{DType, Strides};
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::ops::Range;
use std::panic::Location;

/// A matrix on the rank that owns it.
#[derive(Clone, Debug)]
pub struct OwnedMatrix {
    /// The position of its tensor in the list of tensors.
    pub tensor: usize,
    /// The position of the matrix in its tensor.
    pub index: usize,
    /// The whole matrix, on a mesh without axes: ops on it never communicate.
    pub matrix: Tensor,
}

/// The owners of the matrices of some tensors, and the exchange between shards and owners.
///
/// The owners are all ranks of the mesh, those that hold copies too, and have nearly equal work (longest processing time
/// first, Graham 1969). With numbers of elements n of a matrix, o of the part that its owner holds already, and c of copies of
/// each element, the gathers transfer the sum of n - o over all matrices, the scatters the sum of c n - o.
#[doc(alias = "distributed Muon")]
#[doc(alias = "ZeRO")]
#[derive(Debug)]
pub struct MatrixOwners {
    rank: Rank,
    /// This rank on a mesh without axes.
    alone: Rank,
    stacks: Vec<MatrixStack>,
    /// The matrices of each rank: tensor and index.
    by_owner: Vec<Vec<(usize, usize)>>,
    /// The coordinates of each rank.
    coordinates: Vec<Vec<usize>>,
}

impl MatrixOwners {
    /// Assigns an owner to each matrix. Every rank of the mesh passes the same tensors in the same order.
    #[must_use]
    pub fn assign(rank: &Rank, stacks: Vec<MatrixStack>) -> MatrixOwners {
        let mesh = rank.mesh();
        let num_ranks = mesh.num_ranks();
        let matrices = stacks.iter().enumerate();
        let mut matrices: Vec<(usize, usize)> =
            matrices.flat_map(|(t, stack)| (0..stack.num_matrices()).map(move |i| (t, i))).collect();
        matrices.sort_by_key(|(t, i)| (Reverse(stacks[*t].work()), *t, *i));
        let mut loads: BinaryHeap<Reverse<(u128, usize)>> = (0..num_ranks).map(|r| Reverse((0, r))).collect();
        let mut by_owner = vec![Vec::new(); num_ranks];
        for (t, i) in matrices {
            let Reverse((load, owner)) = loads.pop().expect("a mesh has a rank");
            by_owner[owner].push((t, i));
            loads.push(Reverse((load + stacks[t].work(), owner)));
        }
        by_owner.iter_mut().for_each(|owned| owned.sort_unstable());
        let coordinates = (0..num_ranks).map(|r| mesh.coordinate(r)).collect();
        let mut alone = rank.clone();
        while let Some(axis) = alone.mesh().axes().next() {
            alone = alone.slice(axis);
        }
        MatrixOwners { rank: rank.clone(), alone, stacks, by_owner, coordinates }
    }

    /// Returns the matrices of each rank: the position of the tensor and the index of the matrix in it.
    #[must_use]
    pub fn by_owner(&self) -> &[Vec<(usize, usize)>] {
        &self.by_owner
    }

    /// Gathers each matrix to its owner; returns the matrices of this rank. One all-to-all over the mesh. A collective
    /// call: every rank passes the same tensors.
    ///
    /// # Errors
    /// `Kind::Layout` for tensors of other layouts than those of [`MatrixOwners::assign`], `Kind::DType` for tensors of
    /// several dtypes; `Kind::OutOfMemory`; errors of the collective.
    #[track_caller]
    pub fn gather(&self, tensors: &[Tensor]) -> Result<Vec<OwnedMatrix>> {
        let site = Location::caller();
        let Some(first) = tensors.first() else { return Ok(Vec::new()) };
        let dtype = first.dtype();
        self.check_tensors(tensors).map_err(|e| e.at(site))?;
        let (rank, me) = (&self.rank, self.rank.index());
        let mut exchange = Exchange::new(rank, site);
        for (owner, matrices) in self.by_owner.iter().enumerate() {
            exchange.begin_peer();
            for &(t, i) in matrices {
                let stack = &self.stacks[t];
                let here = rank.coordinates();
                if stack.is_source(here, &self.coordinates[owner]) && stack.part(i, here).is_some() {
                    let local = tensors[t].local();
                    exchange.send(local.with_view(stack.local_view(local, i, here)));
                }
            }
        }
        let parts_from = |peer: &Vec<usize>| {
            let part = |&(t, i): &(usize, usize)| {
                let stack = &self.stacks[t];
                stack.part(i, peer).filter(|_| stack.is_source(peer, &self.coordinates[me]))
            };
            self.by_owner[me].iter().map(part).collect::<Vec<_>>()
        };
        let parts: Vec<Vec<Option<Vec<Range<usize>>>>> = self.coordinates.iter().map(parts_from).collect();
        let numel = |part: &Vec<Range<usize>>| part.iter().map(ExactSizeIterator::len).product::<usize>();
        let receive: Vec<usize> = parts.iter().map(|parts| parts.iter().flatten().map(numel).sum()).collect();
        let mut received = exchange.run(dtype, &receive)?;
        let whole = |&(t, _): &(usize, usize)| LocalTensor::alloc(rank, dtype, &self.stacks[t].whole_shape());
        let mut wholes = self.by_owner[me].iter().map(whole).collect::<Result<Vec<LocalTensor>>>()?;
        for parts in &parts {
            for ((part, whole), (t, _)) in parts.iter().zip(&mut wholes).zip(&self.by_owner[me]) {
                let Some(part) = part else { continue };
                let at = self.stacks[*t].part_of_whole(whole, part);
                let from = received.next_part(&at.shape);
                whole.write(rank, at, &from)?;
            }
        }
        let owned = self.by_owner[me].iter().zip(wholes).map(|(&(tensor, index), whole)| {
            let shape = self.stacks[tensor].matrix_shape();
            let layout = Layout::invariant(self.alone.mesh(), dtype, &shape);
            let local = whole.with_view(Strides::contiguous(&shape));
            OwnedMatrix { tensor, index, matrix: Tensor::assemble(&self.alone, layout, local) }
        });
        Ok(owned.collect())
    }

    /// Scatters one result for each matrix that [`MatrixOwners::gather`] returned, in the same order, to all shards and
    /// copies; returns tensors with the layouts of [`MatrixOwners::assign`] and the dtype of the results. One
    /// all-to-all over the mesh. A collective call.
    ///
    /// # Errors
    /// `Kind::Shape` unless there is one result of its shape and of dtype `dtype` for each matrix; `Kind::OutOfMemory`; errors
    /// of the collective.
    #[track_caller]
    pub fn scatter(&self, dtype: DType, results: &[Tensor]) -> Result<Vec<Tensor>> {
        let site = Location::caller();
        let (rank, me) = (&self.rank, self.rank.index());
        let mut wholes = Vec::with_capacity(results.len());
        self.check_results(dtype, results).map_err(|e| e.at(site))?;
        for (result, (t, _)) in results.iter().zip(&self.by_owner[me]) {
            let shape = self.stacks[*t].whole_shape();
            wholes.push(result.local().flat(rank)?.with_view(Strides::contiguous(&shape)));
        }
        let mut exchange = Exchange::new(rank, site);
        for peer in &self.coordinates {
            exchange.begin_peer();
            for (&(t, i), whole) in self.by_owner[me].iter().zip(&wholes) {
                if let Some(part) = self.stacks[t].part(i, peer) {
                    exchange.send(whole.with_view(self.stacks[t].part_of_whole(whole, &part)));
                }
            }
        }
        let here = rank.coordinates();
        let own_numel = |&(t, i): &(usize, usize)| {
            let part = self.stacks[t].part(i, here);
            part.map_or(0, |part| part.iter().map(ExactSizeIterator::len).product::<usize>())
        };
        let receive: Vec<usize> =
            self.by_owner.iter().map(|matrices| matrices.iter().map(own_numel).sum()).collect();
        let mut received = exchange.run(dtype, &receive)?;
        let local = |stack: &MatrixStack| LocalTensor::alloc(rank, dtype, &stack.layout.local_shape(here));
        let mut locals = self.stacks.iter().map(local).collect::<Result<Vec<LocalTensor>>>()?;
        for &(t, i) in self.by_owner.iter().flatten() {
            if self.stacks[t].part(i, here).is_some() {
                let at = self.stacks[t].local_view(&locals[t], i, here);
                let from = received.next_part(&at.shape);
                locals[t].write(rank, at, &from)?;
            }
        }
        let tensors = self.stacks.iter().zip(locals);
        let assemble = |(stack, local): (&MatrixStack, LocalTensor)| {
            Tensor::assemble(rank, stack.layout.with_dtype(dtype), local)
        };
        Ok(tensors.map(assemble).collect())
    }

    fn check_tensors(&self, tensors: &[Tensor]) -> Result<()> {
        let fits = |(t, stack): (&Tensor, &MatrixStack)| *t.layout() == stack.layout.with_dtype(t.dtype());
        if tensors.len() != self.stacks.len() || !tensors.iter().zip(&self.stacks).all(fits) {
            let text = "tensors have other layouts than those that their owners were assigned by";
            return Err(Error::new(Kind::Layout, text));
        }
        match tensors.iter().find(|t| t.dtype() != tensors[0].dtype()) {
            None => Ok(()),
            Some(other) => {
                let text =
                    format!("matrices of {} and {} in one exchange", tensors[0].dtype(), other.dtype());
                let help = "cast the tensors to one dtype, or exchange the dtypes one after another";
                Err(Error::new(Kind::DType, text).detail("help", help))
            }
        }
    }

    fn check_results(&self, dtype: DType, results: &[Tensor]) -> Result<()> {
        let owned = &self.by_owner[self.rank.index()];
        if results.len() != owned.len() {
            let text = format!("{} results for {} matrices", results.len(), owned.len());
            return Err(Error::new(Kind::Shape, text));
        }
        for (result, (t, _)) in results.iter().zip(owned) {
            let [rows, columns] = self.stacks[*t].matrix_shape();
            if result.layout().extents() != [rows, columns] || result.dtype() != dtype {
                let text =
                    format!("the result for a matrix {dtype}[{rows}, {columns}] is {}", result.layout());
                let help = "return a tensor of the shape and dtype of the matrix";
                return Err(Error::new(Kind::Shape, text).detail("help", help));
            }
        }
        Ok(())
    }
}

/// One all-to-all over the whole mesh, with unequal parts.
struct Exchange<'a> {
    rank: &'a Rank,
    site: &'static Location<'static>,
    parts: Vec<LocalTensor>,
    /// Elements that this rank sends to each rank.
    counts: Vec<usize>,
}

impl Exchange<'_> {
    fn new<'a>(rank: &'a Rank, site: &'static Location<'static>) -> Exchange<'a> {
        Exchange { rank, site, parts: Vec::new(), counts: Vec::with_capacity(rank.mesh().num_ranks()) }
    }

    /// Begins the parts for the next rank.
    fn begin_peer(&mut self) {
        self.counts.push(0);
    }

    /// Adds a part for the rank that was begun last.
    fn send(&mut self, part: LocalTensor) {
        *self.counts.last_mut().expect("a peer was begun") += part.numel();
        self.parts.push(part);
    }

    /// Packs all parts and exchanges them for `receive[i]` elements from each rank i.
    fn run(self, dtype: DType, receive: &[usize]) -> Result<Received> {
        let Exchange { rank, site, parts, counts } = self;
        let mut packed = LocalTensor::alloc(rank, dtype, &[counts.iter().sum()])?;
        let mut offset = 0;
        for part in &parts {
            packed.write(rank, Strides::contiguous(&part.view.shape).at(offset), part)?;
            offset += part.numel();
        }
        let mesh = rank.mesh();
        let axes: AxisSet = mesh.axes().filter(|a| mesh.size(*a) > 1).collect();
        if axes.is_empty() {
            return Ok(Received { buffer: packed, offset: 0 });
        }
        let call = Call { axes, dtype, phase: Phase::Control, path: "", origin: Origin::default(), site };
        let buffer = rank.all_to_all(&call, &packed.buffer, &counts, receive)?;
        let buffer = LocalTensor::from_buffer(buffer, dtype, &[receive.iter().sum()]);
        Ok(Received { buffer, offset: 0 })
    }
}

/// Received elements, which are read part by part.
struct Received {
    buffer: LocalTensor,
    offset: usize,
}

impl Received {
    /// Returns the next part, of a shape.
    fn next_part(&mut self, shape: &[usize]) -> LocalTensor {
        let part = self.buffer.with_view(Strides::contiguous(shape).at(self.offset));
        self.offset += part.numel();
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::methods::value::Value;
    use shardgrad_dist::{Mesh, Record, World};

    /// A tensor, and the shape that its elements have as matrices.
    type Case = (&'static str, &'static [usize]);

    const CASES: [Case; 6] = [
        ("f64[5@a, 7@b]", &[5, 7]),
        ("f64[6, 4@a]", &[6, 4]),
        ("f64[3@b, 4, 5@a]", &[3, 4, 5]),
        ("f64[4, 3@a, 2]", &[4, 6]),
        ("f64[9, 8]", &[9, 8]),
        ("f64[1@a@b, 3]", &[1, 3]),
    ];

    fn stacks(mesh: &Mesh) -> Vec<MatrixStack> {
        let stack =
            |(text, shape): &Case| MatrixStack::new(&Layout::parse(text, mesh).unwrap(), shape).unwrap();
        CASES.iter().map(stack).collect()
    }

    #[test]
    fn matrices_are_whole_on_their_owners_and_results_reach_all_copies() {
        for mesh in ["a=1,b=1", "a=2,b=1", "a=2,b=2", "a=3,b=2"] {
            let mesh = Mesh::parse(mesh).unwrap();
            let outcome = World::run(mesh.clone(), |rank| {
                let stacks = stacks(rank.mesh());
                let tensor = |t: usize| Tensor::from_fn(rank, &stacks[t].layout, |i| (1000 * t + i) as f64);
                let tensors = (0..CASES.len()).map(tensor).collect::<Result<Vec<Tensor>>>()?;
                let owners = MatrixOwners::assign(rank, stacks.clone());
                rank.trace().enable();
                let owned = owners.gather(&tensors)?;
                for OwnedMatrix { tensor, index, matrix } in &owned {
                    let first = 1000 * tensor + index * matrix.shape().iter().product::<usize>();
                    let expected: Vec<f64> =
                        (0..matrix.layout().numel()).map(|i| (first + i) as f64).collect();
                    assert_eq!(matrix.to_f64()?, expected, "{} {tensor} {index}", rank.mesh());
                    assert_eq!(&matrix.shape()[..], stacks[*tensor].matrix_shape());
                }
                let results: Vec<Tensor> = owned.iter().map(|m| m.matrix.scale(2.0)).collect();
                let scattered = owners.scatter(DType::F64, &results)?;
                let records = rank.trace().take();
                rank.trace().disable();
                for (t, (tensor, result)) in tensors.iter().zip(&scattered).enumerate() {
                    assert_eq!(tensor.layout(), result.layout());
                    let doubled: Vec<f64> = tensor.to_local_f64()?.iter().map(|x| 2.0 * x).collect();
                    assert_eq!(result.to_local_f64()?, doubled, "{} tensor {t}", rank.mesh());
                }
                Ok((records, owners.by_owner().to_vec()))
            });
            let (records, by_owner): (Vec<Vec<Record>>, Vec<_>) = outcome.unwrap().into_iter().unzip();
            assert!(by_owner.iter().all(|b| *b == by_owner[0]));
            check_elements(&mesh, &records, &by_owner[0]);
        }
    }

    /// Compares the elements that ranks sent to others with the formula of [`MatrixOwners`].
    fn check_elements(mesh: &Mesh, records: &[Vec<Record>], by_owner: &[Vec<(usize, usize)>]) {
        if mesh.num_ranks() == 1 {
            assert!(records[0].is_empty());
            return;
        }
        let moved = |call: usize| -> usize {
            let of_rank = |(r, records): (usize, &Vec<Record>)| {
                assert_eq!((records.len(), records[call].op), (2, "all_to_all"));
                records[call].numel() - records[call].counts[r]
            };
            records.iter().enumerate().map(of_rank).sum()
        };
        let (mut gathered, mut scattered) = (0, 0);
        for (owner, matrices) in by_owner.iter().enumerate() {
            for &(t, i) in matrices {
                let stack = &stacks(mesh)[t];
                let numel = |r: usize| {
                    let part = stack.part(i, &mesh.coordinate(r));
                    part.map_or(0, |part| part.iter().map(|range| range.len()).product::<usize>())
                };
                let [rows, columns] = stack.matrix_shape();
                let sharded = stack.layout.sharded_axes();
                let copies: usize =
                    mesh.axes().filter(|a| !sharded.contains(*a)).map(|a| mesh.size(a)).product();
                gathered += rows * columns - numel(owner);
                scattered += copies * rows * columns - numel(owner);
            }
        }
        assert_eq!([moved(0), moved(1)], [gathered, scattered], "{mesh}");
    }

    #[test]
    fn owners_have_nearly_equal_work() {
        World::run(Mesh::parse("a=4").unwrap(), |rank| {
            let layout = Layout::parse("f32[10, 8@a, 8]", rank.mesh())?;
            let large = Layout::parse("f32[16@a, 16]", rank.mesh())?;
            let stacks = vec![MatrixStack::new(&layout, &[10, 8, 8])?, MatrixStack::new(&large, &[16, 16])?];
            let owners = MatrixOwners::assign(rank, stacks);
            // The large matrix is as much work as eight small ones.
            assert_eq!(owners.by_owner()[0], [(1, 0)]);
            let counts: Vec<usize> = owners.by_owner()[1..].iter().map(Vec::len).collect();
            assert_eq!(counts, [4, 3, 3]);
            Ok(())
        })
        .unwrap();
    }

    #[test]
    fn tensors_that_are_no_matrices_are_refused() {
        World::run(Mesh::parse("a=2").unwrap(), |rank| {
            let layout = |text| Layout::parse(text, rank.mesh());
            for (text, shape) in [("f32[6]", &[6][..]), ("f32[6, 4]", &[6, 5]), ("f32[6, 4]", &[4, 2, 3])] {
                assert_eq!(MatrixStack::new(&layout(text)?, shape).unwrap_err().kind(), Kind::Shape);
            }
            let partial = MatrixStack::new(&layout("f32[6, 4] +a")?, &[6, 4]);
            assert_eq!(partial.unwrap_err().kind(), Kind::Layout);
            let stack = MatrixStack::new(&layout("f32[6@a, 4]")?, &[6, 4])?;
            let owners = MatrixOwners::assign(rank, vec![stack]);
            let other = Tensor::zeros(rank, &layout("f32[6, 4@a]")?)?;
            assert_eq!(owners.gather(&[other]).unwrap_err().kind(), Kind::Layout);
            let own = Tensor::zeros(rank, &layout("f32[6@a, 4]")?)?;
            let owned = owners.gather(&[own])?;
            let wrong: Vec<Tensor> = owned.iter().map(|m| m.matrix.permute(&[1, 0])).collect();
            // Only the owner has a result that can be refused.
            if rank.index() == 0 {
                assert_eq!(owners.scatter(DType::F32, &wrong).unwrap_err().kind(), Kind::Shape);
            }
            Ok(())
        })
        .unwrap();
    }
}
