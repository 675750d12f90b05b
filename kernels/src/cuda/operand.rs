//! How operands of any strides are described to the library of products.

use crate::strides::Strides;

/// One matrix operand as the library sees it: columns behind each other, perhaps transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Operand {
    /// Whether its rows are what lies together.
    pub(super) transposed: bool,
    /// Elements from one column (or row, if transposed) to the next.
    pub(super) lead: usize,
    /// Elements from one matrix of the stack to the next.
    pub(super) step: usize,
    /// To how many bytes its address is aligned, 256 at most.
    pub(super) alignment: u32,
}

impl Operand {
    /// Describes a view (g, rows, columns) at an address; `None` if the library has no words for its strides.
    pub(super) fn of(view: &Strides, address: u64) -> Option<Operand> {
        let ([_, rows, columns], [_, down, along]) = (dims(&view.shape), dims(&view.strides));
        let plain = lead((rows, down), (columns, along));
        let plain = plain.map(|lead| Operand { transposed: false, ..Operand::with(view, address, lead) });
        plain.or_else(|| Operand::row_major(view, address))
    }

    /// The same with rows behind each other, even where both are true.
    pub(super) fn row_major(view: &Strides, address: u64) -> Option<Operand> {
        let ([_, rows, columns], [_, down, along]) = (dims(&view.shape), dims(&view.strides));
        lead((columns, along), (rows, down)).map(|lead| Operand::with(view, address, lead))
    }

    fn with(view: &Strides, address: u64, lead: usize) -> Operand {
        let [step, _, _] = dims(&view.strides);
        Operand { transposed: true, lead, step, alignment: 1 << address.trailing_zeros().min(8) }
    }

    /// The same memory as the transpose.
    pub(super) fn transposed(self) -> Operand {
        Operand { transposed: !self.transposed, ..self }
    }
}

/// Elements from one line to the next, where a line holds so many at this distance and there are so many lines at that one.
fn lead((inner, near): (usize, usize), (outer, far): (usize, usize)) -> Option<usize> {
    let least = inner.max(1);
    let lies = (inner <= 1 || near == 1) && (outer <= 1 || far >= least);
    lies.then_some(if outer <= 1 { least } else { far })
}

fn dims(list: &[usize]) -> [usize; 3] {
    list.try_into().expect("the contract asks for three dims")
}
