/* Network simplex for circulations whose arcs have convex, piecewise linear costs. `relaxation/simplex.py` describes the
arguments.

Once an optimum is known, the cost of an arc may change: the flow is still a circulation, and few pivots lead from it to
the new optimum. Trees are strongly feasible (Cunningham 1976): from every node flow can go to the root. So the method
ends although most pivots move no flow. Of tied arcs the one leaves the tree that keeps it so.

Pivots walk along few of the numbers of many nodes, so these are apart. All nodes are in one circle, each followed by its
subtree, and numbered along it.
*/

#include <stdint.h>

typedef struct { /* its arc of the tree, towards the root */
    int64_t room[2]; /* by how much more may flow to the parent, and from it, until a segment ends */
    int32_t arc, segment; /* arc −1 at the root */
    int64_t away; /* whether the arc comes from the parent */
} Node;

typedef struct { /* that is not in the tree */
    int32_t source, target, arc;
    int32_t segment; /* the first above the flow */
} Arc;

typedef struct {
    int32_t nodes, others, root, next;
    const int64_t *cost, *low; /* of segments, by arc: what a unit of flow costs, and the flow at which it begins */
    Arc *other;
    Node *node;
    int64_t *potential;
    int32_t *parent, *depth; /* parent −1 at the root */
    int32_t *after, *before, *last; /* neighbours in the circle; where each subtree ends in it */
} Simplex;

#define ENDLESS ((int64_t)1 << 60)

static void join(Simplex *s, int32_t one, int32_t next) {
    s->after[one] = next;
    s->before[next] = one;
}

/* Begin with the tree of `parent`, without flow. */
void simplex_start(Simplex *s) {
    int32_t *child = s->last, *sibling = s->before, one;
    for (one = 0; one < s->nodes; one++)
        child[one] = sibling[one] = -1;
    for (one = 0; one < s->nodes; one++)
        if (one != s->root) {
            const int32_t parent = s->parent[one];
            sibling[one] = child[parent];
            child[parent] = one;
        }
    s->depth[s->root] = 0;
    for (one = s->root; one >= 0;) {
        int32_t next = child[one], above = one;
        while (next < 0 && above != s->root)
            next = sibling[above], above = s->parent[above];
        if (next >= 0)
            s->depth[next] = s->depth[s->parent[next]] + 1;
        s->after[one] = next < 0 ? s->root : next;
        one = next;
    }
    for (one = 0; one < s->nodes; one++) {
        s->before[s->after[one]] = one;
        s->last[one] = one;
    }
    for (one = s->before[s->root]; one != s->root; one = s->before[one]) {
        const int32_t parent = s->parent[one];
        if (s->last[parent] == parent)
            s->last[parent] = s->last[one];
    }
}

/* Raise the potentials and depths of nodes that follow each other, from both ends: two walks wait for memory at once. */
static void raise(Simplex *s, int32_t one, int32_t end, int64_t by, int32_t deeper) {
    int64_t *potential = s->potential;
    int32_t *depth = s->depth;
    const int32_t *after = s->after, *before = s->before;
    for (;;) {
        potential[one] += by;
        depth[one] += deeper;
        if (one == end)
            return;
        one = after[one];
        potential[end] += by;
        depth[end] += deeper;
        if (one == end)
            return;
        end = before[end];
    }
}

/* Follow a change of the cost of an arc that has one segment. */
void simplex_follow(Simplex *s, int32_t arc, int64_t by) {
    for (int32_t one = 0; one < s->nodes; one++)
        if (s->node[one].arc == arc)
            raise(s, one, s->last[one], s->node[one].away ? by : -by, 0);
}

/* Number the nodes along the circle, from the root: a subtree is one piece of memory then, until pivots disturb it. */
static void renumber(Simplex *s) {
    int32_t *number = s->before, one = s->root;
    for (int32_t count = 0; count < s->nodes; count++, one = s->after[one])
        number[one] = count;
    for (one = 0; one < s->others; one++) {
        s->other[one].source = number[s->other[one].source];
        s->other[one].target = number[s->other[one].target];
    }
    for (one = 0; one < s->nodes; one++) {
        if (one != s->root)
            s->parent[one] = number[s->parent[one]];
        s->last[one] = number[s->last[one]];
    }
    for (one = 0; one < s->nodes; one++)
        while (number[one] != one) {
            const int32_t to = number[one], last = s->last[to], depth = s->depth[to], parent = s->parent[to];
            const int64_t potential = s->potential[to];
            const Node node = s->node[to];
            number[one] = number[to], number[to] = to;
            s->node[to] = s->node[one], s->node[one] = node;
            s->potential[to] = s->potential[one], s->potential[one] = potential;
            s->depth[to] = s->depth[one], s->depth[one] = depth;
            s->parent[to] = s->parent[one], s->parent[one] = parent;
            s->last[to] = s->last[one], s->last[one] = last;
        }
    s->root = 0;
    for (one = 0; one < s->nodes; one++)
        join(s, one, one + 1 < s->nodes ? one + 1 : 0);
}

/* An arc on which a change of flow saves, the one that saves most of a block of arcs; −1 if there is none. */
static int32_t entering(Simplex *s, int32_t block) {
    const int64_t *potential = s->potential;
    int32_t best = -1, one = s->next;
    int64_t least = 0;
    for (int32_t left = s->others; left > 0;) {
        int32_t end = one + block;
        if (end > s->others)
            end = s->others;
        if (end > one + left)
            end = one + left;
        left -= end - one;
        for (; one < end; one++) {
            const Arc *arc = &s->other[one];
            const int64_t rise = potential[arc->source] - potential[arc->target];
            const int64_t *cost = s->cost + arc->segment;
            const int64_t more = cost[0] + rise, less = -(cost[-1] + rise);
            const int64_t change = more < less ? more : less;
            if (change < least)
                least = change, best = one;
        }
        if (one == s->others)
            one = 0;
        if (best >= 0)
            break;
    }
    s->next = one;
    return best;
}

/* Move the subtree of `out`: from now on it hangs at `above`, by `moved`, which is in it. */
static void hang(Simplex *s, int32_t out, int32_t moved, int32_t above, int64_t by) {
    const int32_t *parent = s->parent;
    int32_t *after = s->after, *before = s->before, *last = s->last;
    const int32_t end = last[out], previous = before[out];
    for (int32_t up = parent[out]; up >= 0 && last[up] == end; up = parent[up])
        last[up] = previous;
    join(s, previous, after[end]);

    /* Each node on the way from `moved` to `out` follows, with what is left of its subtree, that of the one below. */
    int32_t one = moved, one_end = last[one], one_before = before[one], one_after = after[one_end];
    int32_t tail = one_end, depth = s->depth[above] + 1;
    raise(s, one, tail, by, depth - s->depth[one]);
    while (one != out) {
        const int32_t up = parent[one], up_end = last[up], up_before = before[up];
        const int32_t up_after = up_end == one_end ? one_after : after[up_end];
        if (up_end != one_end)
            join(s, one_before, one_after);
        join(s, tail, up);
        tail = up_end == one_end ? one_before : up_end;
        raise(s, up, tail, by, ++depth - s->depth[up]);
        one = up, one_end = up_end, one_before = up_before, one_after = up_after;
    }
    join(s, tail, after[above]);
    join(s, above, moved);
    for (int32_t up = above; up >= 0 && last[up] == above; up = parent[up])
        last[up] = tail;
    for (one = moved;; one = parent[one]) {
        last[one] = tail;
        if (one == out)
            return;
    }
}

/* See by how much the flow to the parent, or from it, may grow. Returns the parent. */
static inline int32_t limit(const Simplex *s, int32_t one, int from, int64_t *most, int32_t *out) {
    const int64_t room = s->node[one].room[from];
    if (from ? room < *most : room <= *most)
        *most = room, *out = one;
    return s->parent[one];
}

/* Change the flow on an arc and around the cycle that it closes in the tree. Returns 0 if nothing limits it. */
static int pivot(Simplex *s, int32_t in) {
    Node *node = s->node;
    int32_t *parent = s->parent;
    Arc *new = &s->other[in];
    const int more = s->cost[new->segment] + s->potential[new->source] - s->potential[new->target] < 0;
    const int32_t segment = more ? new->segment : new->segment - 1;
    const int64_t whole = s->low[segment + 1] - s->low[segment];
    const int32_t first = more ? new->source : new->target, second = more ? new->target : new->source;
    int64_t most = whole, most_second = ENDLESS << 1;
    int32_t out = -1, out_second = -1, one = first, other = second;
    /* Flow can go to the root, so only arcs from it have no room, and the first of these leaves: no need to look further. */
    for (int32_t deeper = s->depth[one] - s->depth[other]; deeper > 0 && most; deeper--)
        one = limit(s, one, 1, &most, &out);
    for (int32_t deeper = s->depth[other] - s->depth[one]; deeper > 0; deeper--)
        other = limit(s, other, 0, &most_second, &out_second);
    while (one != other && most) {
        one = limit(s, one, 1, &most, &out);
        other = limit(s, other, 0, &most_second, &out_second);
    }
    const int of_first = most < most_second;
    if (!of_first)
        most = most_second, out = out_second;
    if (most >= ENDLESS)
        return 0;
    if (most) {
        const int32_t meeting = one;
        for (one = first; one != meeting; one = parent[one])
            node[one].room[0] += most, node[one].room[1] -= most;
        for (one = second; one != meeting; one = parent[one])
            node[one].room[0] -= most, node[one].room[1] += most;
    }
    if (out < 0) { /* the arc reached the end of its own segment */
        new->segment = segment + more;
        return 1;
    }
    const int32_t moved = of_first ? first : second, above = of_first ? second : first, below = parent[out];
    const Node old = node[out];
    const int away = new->source != moved;
    const int64_t cost = away ? s->cost[segment] : -s->cost[segment];
    hang(s, out, moved, above, s->potential[above] + cost - s->potential[moved]);

    /* The arcs on the way from `moved` to `out` change ends. */
    Node next = {.arc = new->arc, .segment = segment, .away = away};
    next.room[away] = more ? whole - most : most;
    next.room[!away] = whole - next.room[away];
    one = moved;
    for (int32_t up = above;;) {
        const Node own = node[one];
        const int32_t following = parent[one];
        node[one] = next;
        parent[one] = up;
        if (one == out)
            break;
        next = (Node){{own.room[1], own.room[0]}, own.arc, own.segment, !own.away};
        up = one, one = following;
    }
    *new = (Arc){old.away ? below : out, old.away ? out : below, old.arc, old.segment + !old.room[old.away]};
    return 1;
}

/* Pivot until no change of flow saves anything. Returns the number of pivots, −1 if saving has no end. */
int64_t simplex_solve(Simplex *s, int32_t block) {
    int32_t in;
    renumber(s);
    for (int64_t pivots = 0;; pivots++) {
        if ((in = entering(s, block)) < 0)
            return pivots;
        if (!pivot(s, in))
            return -1;
    }
}
