/* Network simplex for circulations whose arcs have convex, piecewise linear costs. `relaxation/simplex.py` describes the
arguments.

Once an optimum is known, the cost of an arc may change: the flow is still a circulation, and few pivots lead from it to
the new optimum. Trees are strongly feasible (Cunningham 1976): from every node flow can go to the root. So the method
ends although most pivots move no flow. Of tied arcs the one leaves the tree that keeps it so.
*/

#include <stdint.h>

typedef struct {
    int64_t potential;
    int32_t parent, arc; /* towards the root; −1 at the root */
    int32_t depth, child, after, before;
} Node;

typedef struct {
    int64_t flow;
    int32_t source, target;
    int32_t segment; /* of the flow, or, if the arc is not in the tree, the first above it */
    int32_t in_tree;
} Arc;

typedef struct {
    int32_t nodes, arcs, root, next;
    const int64_t *cost, *low; /* of segments, by arc: what a unit of flow costs, and the flow at which it begins */
    Node *node;
    Arc *arc;
} Simplex;

#define ENDLESS ((int64_t)1 << 60)

static void attach(Node *node, int32_t one, int32_t parent, int32_t arc) {
    node[one].parent = parent;
    node[one].arc = arc;
    node[one].before = -1;
    node[one].after = node[parent].child;
    if (node[parent].child >= 0)
        node[node[parent].child].before = one;
    node[parent].child = one;
}

static void detach(Node *node, int32_t one) {
    if (node[one].before >= 0)
        node[node[one].before].after = node[one].after;
    else
        node[node[one].parent].child = node[one].after;
    if (node[one].after >= 0)
        node[node[one].after].before = node[one].before;
}

/* Raise the potentials of a subtree, and correct its depths. */
static void raise(Node *node, int32_t top, int64_t by) {
    int32_t one = top;
    for (;;) {
        node[one].potential += by;
        node[one].depth = node[node[one].parent].depth + 1;
        if (node[one].child >= 0) {
            one = node[one].child;
            continue;
        }
        while (one != top && node[one].after < 0)
            one = node[one].parent;
        if (one == top)
            return;
        one = node[one].after;
    }
}

/* Begin with the tree of `parent` and `arc`. */
void simplex_start(Simplex *s) {
    Node *node = s->node;
    for (int32_t one = 0; one < s->nodes; one++)
        node[one].child = -1;
    for (int32_t one = 0; one < s->nodes; one++)
        if (one != s->root)
            attach(node, one, node[one].parent, node[one].arc);
    node[s->root].depth = 0;
    for (int32_t one = node[s->root].child; one >= 0; one = node[one].after)
        raise(node, one, 0);
}

/* Follow a change of the cost of an arc that has one segment. */
void simplex_follow(Simplex *s, int32_t changed, int64_t by) {
    const Arc *arc = &s->arc[changed];
    if (!arc->in_tree)
        return;
    if (s->node[arc->source].arc == changed)
        raise(s->node, arc->source, -by);
    else
        raise(s->node, arc->target, by);
}

/* An arc on which a change of flow saves, the one that saves most of a block of arcs; −1 if there is none. */
static int32_t entering(Simplex *s, int32_t block) {
    int32_t best = -1, one = s->next;
    int64_t least = 0;
    for (int32_t left = s->arcs, count = block; left; left--) {
        const Arc *arc = &s->arc[one];
        if (!arc->in_tree) {
            const int64_t rise = s->node[arc->source].potential - s->node[arc->target].potential;
            const int64_t *cost = s->cost + arc->segment;
            const int64_t more = cost[0] + rise, less = -(cost[-1] + rise);
            const int64_t change = more < less ? more : less;
            if (change < least)
                least = change, best = one;
        }
        one = one + 1 < s->arcs ? one + 1 : 0;
        if (!--count) {
            if (best >= 0)
                break;
            count = block;
        }
    }
    s->next = one;
    return best;
}

static int32_t meeting(const Node *node, int32_t one, int32_t other) {
    while (one != other)
        if (node[one].depth > node[other].depth)
            one = node[one].parent;
        else if (node[one].depth < node[other].depth)
            other = node[other].parent;
        else
            one = node[one].parent, other = node[other].parent;
    return one;
}

/* By how much the flow on an arc of the tree can change until its segment ends. */
static int64_t room(const Simplex *s, const Arc *arc, int more) {
    return more ? s->low[arc->segment + 1] - arc->flow : arc->flow - s->low[arc->segment];
}

/* Change the flow on an arc and around the cycle that it closes in the tree. Returns 0 if nothing limits it. */
static int pivot(Simplex *s, int32_t in) {
    Node *node = s->node;
    Arc *arc = s->arc, *new = &s->arc[in];
    const int more = s->cost[new->segment] + node[new->source].potential - node[new->target].potential < 0;
    if (!more)
        new->segment--;
    const int32_t first = more ? new->source : new->target, second = more ? new->target : new->source;
    const int32_t join = meeting(node, first, second);
    int64_t most = room(s, new, more);
    int32_t out = -1;
    int of_first = 0;
    for (int32_t one = first; one != join; one = node[one].parent) {
        const Arc *of_tree = &arc[node[one].arc];
        const int64_t left = room(s, of_tree, of_tree->source != one);
        if (left < most)
            most = left, out = one, of_first = 1;
    }
    for (int32_t one = second; one != join; one = node[one].parent) {
        const Arc *of_tree = &arc[node[one].arc];
        const int64_t left = room(s, of_tree, of_tree->source == one);
        if (left <= most)
            most = left, out = one, of_first = 0;
    }
    if (most >= ENDLESS)
        return 0;
    if (most) {
        new->flow += more ? most : -most;
        for (int32_t one = first; one != join; one = node[one].parent)
            arc[node[one].arc].flow += arc[node[one].arc].source != one ? most : -most;
        for (int32_t one = second; one != join; one = node[one].parent)
            arc[node[one].arc].flow += arc[node[one].arc].source == one ? most : -most;
    }
    if (out < 0) { /* the arc reached the end of its own segment */
        new->segment += more;
        return 1;
    }
    Arc *old = &arc[node[out].arc];
    old->in_tree = 0;
    old->segment += old->flow != s->low[old->segment];
    new->in_tree = 1;

    const int32_t moved = of_first ? first : second;
    int32_t one = moved, parent = of_first ? second : first, by = in;
    const int64_t cost = s->cost[new->segment];
    const int64_t wanted = node[parent].potential + (new->source == moved ? -cost : cost);
    for (;;) { /* turn the way from the new arc to the old one around */
        const int32_t next = node[one].parent, next_by = node[one].arc;
        detach(node, one);
        attach(node, one, parent, by);
        if (one == out)
            break;
        parent = one, by = next_by, one = next;
    }
    raise(node, moved, wanted - node[moved].potential);
    return 1;
}

/* Pivot until no change of flow saves anything. Returns the number of pivots, −1 if saving has no end. */
int64_t simplex_solve(Simplex *s, int32_t block) {
    int32_t in;
    for (int64_t pivots = 0;; pivots++) {
        if ((in = entering(s, block)) < 0)
            return pivots;
        if (!pivot(s, in))
            return -1;
    }
}
