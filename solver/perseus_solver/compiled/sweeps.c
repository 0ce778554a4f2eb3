/* Sweeps over a precedence graph, for eight plans side by side. `search/sweeps.py` describes the arguments.

A sweep visits the rows of the graph in order, from the start or from the end, and gives each the option that is best
within the time that its neighbours leave. Plans are independent, so the inner loops run over them: while one waits for
a number from memory, the others go on. Every function that is called from outside returns whether memory was lacking.
*/

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 8
#define EACH for (int j = 0; j < LANES; j++)
#define MOST_SHARES 8

/* What a sweep needs to know of one direction: the edges into each row, from rows that are visited before it. */
typedef struct {
    const int32_t *first; /* int[rows + 1], where the edges of each row begin */
    const int32_t *near;  /* int[edges], the row at the other end */
    const double *delay;  /* float[edges], ticks */
} Links;

typedef struct {
    int32_t rows, kinds, levels, width, corners;
    const int32_t *table, *kind, *level; /* int[rows] */
    const int32_t *table_of_kind;        /* int[kinds] */
    const int32_t *options;              /* int[tables] */
    Links before, after;
    const double *ticks, *energy; /* float[tables, width], by increasing ticks, then at least one that is infinite */
    const double *above;          /* float[tables, corners + 1], prices from which on a faster corner is best */
    const int16_t *best;          /* int[tables, corners, width], for each corner the best of options 0 to k */
} Problem;

/* Eight plans. */
typedef struct {
    int16_t *choice;          /* int[rows, LANES] */
    double *swept, *other;    /* float[rows, LANES], times from either end to the far end of each row */
    int16_t *worth;           /* int[MOST_SHARES, kinds, LANES], the corner that is best at the worth of time */
    double deadline[LANES], makespan[LANES], energy[LANES];
} Block;

static int allot(const Problem *p, Block *b) {
    size_t cells = (size_t)p->rows * LANES;
    b->choice = malloc(cells * sizeof *b->choice);
    b->swept = malloc(cells * sizeof *b->swept);
    b->other = malloc(cells * sizeof *b->other);
    b->worth = malloc((size_t)p->kinds * LANES * MOST_SHARES * sizeof *b->worth);
    return b->choice && b->swept && b->other && b->worth;
}

static void discard(Block *b) {
    free(b->choice), free(b->swept), free(b->other), free(b->worth);
}

/* When the last of a row's neighbours has ended. */
static inline void latest(const double *times, const Links *links, int32_t row, double *out) {
    EACH out[j] = 0.0;
    for (int32_t e = links->first[row]; e < links->first[row + 1]; e++) {
        const double *near = times + (size_t)links->near[e] * LANES;
        const double delay = links->delay[e];
        EACH {
            double at = near[j] + delay;
            out[j] = at > out[j] ? at : out[j];
        }
    }
}

/* Times from one end to the far end of every row. */
static void measure(const Problem *p, const int16_t *choice, double *times, int backward) {
    const Links *links = backward ? &p->after : &p->before;
    for (int32_t i = 0; i < p->rows; i++) {
        const int32_t row = backward ? p->rows - 1 - i : i;
        const double *ticks = p->ticks + (size_t)p->table[row] * p->width;
        const int16_t *own = choice + (size_t)row * LANES;
        double *to = times + (size_t)row * LANES;
        double near[LANES];
        latest(times, links, row, near);
        EACH to[j] = near[j] + ticks[own[j]];
    }
}

static void total(const Problem *p, Block *b, const double *times) {
    EACH b->makespan[j] = 0.0, b->energy[j] = 0.0;
    for (int32_t row = 0; row < p->rows; row++) {
        const double *energy = p->energy + (size_t)p->table[row] * p->width;
        const int16_t *own = b->choice + (size_t)row * LANES;
        const double *at = times + (size_t)row * LANES;
        EACH {
            b->makespan[j] = at[j] > b->makespan[j] ? at[j] : b->makespan[j];
            b->energy[j] += energy[own[j]];
        }
    }
}

/* Note which corner is best for a kind at each share of a price of time. Shares fall. */
static inline void set_worth(const Problem *p, Block *b, int lane, int32_t kind, double price, int64_t shares,
                             const double *share) {
    const double *above = p->above + (size_t)p->table_of_kind[kind] * (p->corners + 1);
    int corner = 0;
    while (above[corner + 1] <= price * share[0])
        corner++;
    for (int s = 0; s < shares; s++) {
        while (above[corner] > price * share[s])
            corner--;
        b->worth[((size_t)s * p->kinds + kind) * LANES + lane] = (int16_t)corner;
    }
}

/* Offer slack, one sweep for each share, from alternate ends; options only become slower. */
static void reclaim(const Problem *p, Block *b, int64_t count, int backward) {
    measure(p, b->choice, b->swept, !backward);
    for (int s = 0; s < count; s++, backward = !backward) {
        double *swap = b->swept;
        b->swept = b->other, b->other = swap;
        const int16_t *worth = b->worth + (size_t)s * p->kinds * LANES;
        const Links *links = backward ? &p->after : &p->before;
        for (int32_t i = 0; i < p->rows; i++) {
            const int32_t row = backward ? p->rows - 1 - i : i;
            const double *ticks = p->ticks + (size_t)p->table[row] * p->width;
            const int16_t *best = p->best + (size_t)p->table[row] * p->corners * p->width;
            const int16_t *corner = worth + (size_t)p->kind[row] * LANES;
            const double *rest = b->other + (size_t)row * LANES;
            int16_t *own = b->choice + (size_t)row * LANES;
            double *to = b->swept + (size_t)row * LANES;
            double near[LANES];
            latest(b->swept, links, row, near);
            EACH {
                int k = own[j];
                const double limit = b->deadline[j] - (rest[j] - ticks[k]) - near[j];
                if (ticks[k + 1] <= limit) {
                    do
                        k++;
                    while (ticks[k + 1] <= limit);
                    const int slower = best[(size_t)corner[j] * p->width + k];
                    own[j] = (int16_t)(slower > own[j] ? slower : own[j]);
                }
                to[j] = near[j] + ticks[own[j]];
            }
        }
    }
    total(p, b, b->swept);
}

/* The last option within a limit; the fastest where none is. */
static inline int within(const double *ticks, int options, double limit) {
    int k = 0;
    for (int step = 1 << 15; step; step >>= 1)
        if (k + step < options && ticks[k + step] <= limit)
            k += step;
    return k;
}

/* Which plan is in a lane of a block; behind the last plan, the last again. */
static inline int64_t in_lane(int64_t first, int lane, int64_t plans) {
    return first + lane < plans ? first + lane : plans - 1;
}

static void load(const Problem *p, Block *b, const int16_t *choice, const int64_t *plan) {
    EACH {
        const int16_t *own = choice + plan[j] * p->rows;
        for (int32_t row = 0; row < p->rows; row++)
            b->choice[(size_t)row * LANES + j] = own[row];
    }
}

static void store(const Problem *p, const Block *b, int lane, int16_t *choice) {
    for (int32_t row = 0; row < p->rows; row++)
        choice[row] = b->choice[(size_t)row * LANES + lane];
}

/* Put the plans from a first one on into the lanes, and measure them from the start. */
static void take(const Problem *p, Block *b, const int16_t *choice, int64_t first, int64_t plans, int64_t *plan) {
    EACH plan[j] = in_lane(first, j, plans);
    load(p, b, choice, plan);
    measure(p, b->choice, b->swept, 0);
    total(p, b, b->swept);
}

/* Energy and makespan of plans, and, if it is asked for, when each row begins and ends. */
int sweeps_measure(const Problem *p, int64_t plans, const int16_t *choice, double *energy, double *makespan,
                   double *start, double *finish) {
    Block b;
    int failed = !allot(p, &b);
    for (int64_t first = 0; first < plans && !failed; first += LANES) {
        int64_t plan[LANES];
        take(p, &b, choice, first, plans, plan);
        EACH {
            makespan[plan[j]] = b.makespan[j], energy[plan[j]] = b.energy[j];
            for (int32_t row = 0; row < p->rows && finish; row++) {
                const size_t at = (size_t)row * LANES + j, to = plan[j] * p->rows + row;
                finish[to] = b.swept[at];
                start[to] = b.swept[at] - p->ticks[(size_t)p->table[row] * p->width + b.choice[at]];
            }
        }
    }
    discard(&b);
    return failed;
}

/* Use the slack of plans, until their deadlines or their own later ends. */
int sweeps_improve(const Problem *p, int64_t plans, int16_t *choice, const double *deadline) {
    Block b;
    int failed = !allot(p, &b);
    if (!failed)
        memset(b.worth, 0, (size_t)p->kinds * LANES * sizeof *b.worth);
    for (int64_t first = 0; first < plans && !failed; first += LANES) {
        int64_t plan[LANES];
        take(p, &b, choice, first, plans, plan);
        EACH b.deadline[j] = deadline[plan[j]] > b.makespan[j] ? deadline[plan[j]] : b.makespan[j];
        reclaim(p, &b, 1, 0);
        EACH store(p, &b, j, choice + plan[j] * p->rows);
    }
    discard(&b);
    return failed;
}

typedef struct {
    const double *start, *finish; /* float[lines, rows] */
    const double *through;        /* float[lines, kinds] */
    const double *makespan;       /* float[lines] */
} Curve;

typedef struct {
    int64_t count;              /* for each deadline */
    const int64_t *fast, *slow; /* int[count, plans], lines of the curve */
    const uint8_t *late, *backward;
} Mixtures;

/* Choose options that keep up with mixtures of two timetables, one of them shifted to end at the deadline. */
static void follow(const Problem *p, Block *b, const Curve *curve, const int64_t *fast, const int64_t *slow, int late,
                   int backward) {
    const double *times = backward ? curve->start : curve->finish;
    const double *one[LANES], *other[LANES];
    double shift[LANES];
    EACH {
        one[j] = times + fast[j] * p->rows, other[j] = times + slow[j] * p->rows;
        shift[j] = late ? curve->makespan[slow[j]] - b->deadline[j] : b->deadline[j] - curve->makespan[fast[j]];
        shift[j] = shift[j] > 0.0 ? shift[j] : 0.0;
    }
    const Links *links = backward ? &p->after : &p->before;
    for (int32_t i = 0; i < p->rows; i++) {
        const int32_t row = backward ? p->rows - 1 - i : i, table = p->table[row];
        const double *ticks = p->ticks + (size_t)table * p->width;
        const int16_t *best = p->best + (size_t)table * p->corners * p->width;
        const int16_t *corner = b->worth + (size_t)p->kind[row] * LANES;
        int16_t *own = b->choice + (size_t)row * LANES;
        double *to = b->swept + (size_t)row * LANES;
        double near[LANES];
        latest(b->swept, links, row, near);
        EACH {
            const double moved = late ? other[j][row] - shift[j] : one[j][row] + shift[j];
            const double fixed = late ? one[j][row] : other[j][row];
            const double target = (moved > fixed) == late ? moved : fixed;
            const double limit = (backward ? b->deadline[j] - target : target) - near[j];
            own[j] = best[(size_t)corner[j] * p->width + within(ticks, p->options[table], limit)];
            to[j] = near[j] + ticks[own[j]];
        }
    }
}

/* Replace each plan by the cheapest of its mixtures if that takes less energy. */
int sweeps_mix(const Problem *p, int64_t plans, int16_t *choice, double *energy, const double *deadline,
               const double *through, int64_t shares, const double *share, const Curve *curve, const Mixtures *m,
               double tie) {
    Block b;
    const double full = 1.0;
    int failed = !allot(p, &b);
    for (int64_t first = 0; first < plans && !failed; first += LANES) {
        int64_t plan[LANES];
        EACH plan[j] = in_lane(first, j, plans), b.deadline[j] = deadline[plan[j]];
        for (int64_t c = 0; c < m->count; c++) {
            int64_t fast[LANES], slow[LANES];
            EACH {
                fast[j] = m->fast[c * plans + plan[j]], slow[j] = m->slow[c * plans + plan[j]];
                const double *one = curve->through + fast[j] * p->kinds, *other = curve->through + slow[j] * p->kinds;
                for (int32_t kind = 0; kind < p->kinds; kind++)
                    set_worth(p, &b, j, kind, tie * (one[kind] < other[kind] ? one[kind] : other[kind]), 1, &full);
            }
            follow(p, &b, curve, fast, slow, m->late[c], m->backward[c]);
            EACH {
                const double *own = through + plan[j] * p->kinds;
                for (int32_t kind = 0; kind < p->kinds; kind++)
                    set_worth(p, &b, j, kind, own[kind], shares, share);
            }
            reclaim(p, &b, shares, m->backward[c]);
            for (int j = 0; j < LANES && first + j < plans; j++)
                if (b.makespan[j] <= b.deadline[j] && b.energy[j] < energy[plan[j]]) {
                    energy[plan[j]] = b.energy[j];
                    store(p, &b, j, choice + plan[j] * p->rows);
                }
        }
    }
    discard(&b);
    return failed;
}

static inline uint64_t scrambled(uint64_t x) { /* splitmix64 */
    x += 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

static inline double uniform(uint64_t *state) {
    *state = scrambled(*state);
    return (double)(*state >> 11) * 0x1p-53;
}

typedef struct {
    double most, least_noise, most_noise, least_part;
} Ruin;

/* Make a random part of a plan as fast as it would be if time were worth more. */
static void ruin_lane(const Problem *p, Block *b, int lane, const Ruin *ruin, const double *through, int64_t shares,
                      const double *share, uint64_t seed) {
    uint64_t state = scrambled(seed);
    const double spread = exp(log(ruin->least_noise) + uniform(&state) * log(ruin->most_noise / ruin->least_noise));
    const double price = 1.0 + uniform(&state) * (ruin->most - 1.0);
    const double centre = uniform(&state) * p->levels;
    /* Up to twice the levels, so that a part around either end may still be the whole. */
    const double reach = p->levels * exp(log(ruin->least_part) + uniform(&state) * log(2.0 / ruin->least_part)) / 2.0;
    for (int32_t kind = 0; kind < p->kinds; kind++) {
        state = scrambled(state);
        /* The sum of four uniform numbers is nearly normal, and five terms are nearly an exponential. */
        double z = (double)((state & 0xffff) + (state >> 16 & 0xffff) + (state >> 32 & 0xffff) + (state >> 48));
        z = (z * 0x1p-16 - 2.0) * 1.7320508 * spread;
        z = 1.0 + z * (1.0 + z * (0.5 + z * (1.0 / 6.0 + z / 24.0)));
        set_worth(p, b, lane, kind, through[kind] * price * z, shares, share);
    }
    for (int32_t row = 0; row < p->rows; row++) {
        if (fabs(p->level[row] - centre) > reach)
            continue;
        const int32_t table = p->table[row];
        const int corner = b->worth[(size_t)p->kind[row] * LANES + lane];
        const int16_t cheapest = p->best[((size_t)table * p->corners + corner) * p->width + p->options[table] - 1];
        int16_t *own = b->choice + (size_t)row * LANES + lane;
        *own = cheapest < *own ? cheapest : *own;
    }
}

/* Ruin and recreate plans: in each round replace each by the cheapest of its trials if that takes less energy. */
int sweeps_descend(const Problem *p, int64_t plans, int16_t *choice, double *energy, const double *deadline,
                   const double *through, int64_t shares, const double *share, const Ruin *ruin, int64_t tries,
                   int64_t rounds, uint64_t seed) {
    Block b;
    int16_t *before = malloc((size_t)plans * p->rows * sizeof *before);
    int failed = !allot(p, &b) || !before;
    for (int64_t round = 0; round < rounds && !failed; round++) {
        memcpy(before, choice, (size_t)plans * p->rows * sizeof *before);
        for (int64_t first = 0; first < plans * tries; first += LANES) {
            int64_t plan[LANES];
            EACH plan[j] = in_lane(first, j, plans * tries) / tries, b.deadline[j] = deadline[plan[j]];
            load(p, &b, before, plan);
            EACH ruin_lane(p, &b, j, ruin, through + plan[j] * p->kinds, shares, share,
                           scrambled(seed + round) ^ (first + j));
            reclaim(p, &b, shares, (seed + round) % 2);
            for (int j = 0; j < LANES && first + j < plans * tries; j++)
                if (b.energy[j] < energy[plan[j]]) {
                    energy[plan[j]] = b.energy[j];
                    store(p, &b, j, choice + plan[j] * p->rows);
                }
        }
    }
    free(before);
    discard(&b);
    return failed;
}
